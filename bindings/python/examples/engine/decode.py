"""Token by token through several caches side by side: scores of given windows, or generated answers.

Every step is one forward pass over the new tokens of all caches, so the weights are read once for all.
The first cache is the reference that the others are compared with.
"""

from dataclasses import dataclass

import numpy as np

from .caches import SideBySide


@dataclass
class Score:
    """How well one cache predicts the scored positions; one entry a position."""

    surprise: np.ndarray    # -log p(next token), nats
    divergence: np.ndarray  # KL(reference || this) of the next-token distribution, nats
    same_top: np.ndarray    # whether the most likely token is the reference's

    @property
    def perplexity(self):
        return float(np.exp(self.surprise.mean(dtype=np.float64)))

    @property
    def kl(self):
        return float(self.divergence.mean(dtype=np.float64))

    @property
    def top1(self):
        return float(self.same_top.mean())


def score_windows(model, caches, windows, first, advance=lambda: None):
    """Decodes windows of token ids, one sequence each, and scores every position from `first` on.

    caches: by name; each holds len(windows) empty sequences. The windows may differ in length.
    advance() is called after every step. Returns a Score for each name.
    """
    together = SideBySide(list(caches.values()))
    pieces = []
    for position in range(max(map(len, windows)) - 1):
        live = [window for window in windows if position + 1 < len(window)]
        counts = [int(position + 1 < len(window)) for window in windows]
        tokens = np.tile([window[position] for window in live], len(caches))
        hidden = model.forward(tokens, np.full(len(tokens), position), together.attention(counts))
        if position >= first:
            logits = model.logits(hidden).reshape(len(caches), len(live), -1)
            pieces.append(compare(logits, [window[position + 1] for window in live]))
        advance()
    columns = [np.concatenate(part, axis=1) for part in zip(*pieces)]
    return {name: Score(*(column[i] for column in columns)) for i, name in enumerate(caches)}


def compare(logits, targets):
    """Surprise, divergence from the first cache and same_top, each [caches, rows], of logits
    [caches, rows, vocabulary], which are overwritten."""
    top = logits.argmax(-1)
    logits -= logits.max(-1, keepdims=True)
    weights = np.exp(logits)
    totals = weights.sum(-1)
    log_totals = np.log(totals)
    surprise = log_totals - logits[:, np.arange(len(targets)), targets]
    reference = weights[0] / totals[0][:, None]
    # Differences of logits, not of logarithms summed apart: exact where both distributions are close.
    divergence = np.stack([np.einsum("rv,rv->r", reference, logits[0] - other) for other in logits])
    divergence += log_totals - log_totals[0]
    return surprise, divergence, top == top[0]


@dataclass
class Answer:
    """What one cache answered to one prompt."""

    tokens: list     # greedy, running freely on its own tokens, up to a stop token
    agreement: list  # for each token of the reference's answer: this cache, given the reference's
                     # tokens so far, would have chosen the same


def generate(model, caches, prompts, count, stops, advance=lambda: None):
    """Greedy answers of up to `count` tokens to prompts of any lengths, repeated tokens made less likely.

    Each cache holds 2 * len(prompts) empty sequences: the first half runs freely, the second half is fed
    the reference's tokens. Returns for each name one Answer a prompt.
    """
    everything = list(caches.values())
    together = SideBySide(everything)
    half, lengths = len(prompts), [len(prompt) for prompt in prompts]
    # The prompt attends to itself in full precision, so one pass serves every sequence of every cache.
    start = np.concatenate([np.arange(length) for length in lengths])
    hidden = model.forward(np.concatenate(prompts), start, prompt_attention(everything, lengths))
    logits = model.logits(hidden[np.cumsum(lengths) - 1])
    chosen = np.tile(logits.argmax(-1), (len(everything), 2))
    used = np.zeros((*chosen.shape, logits.shape[-1]), bool)
    history = []
    for step in range(count):
        history.append(chosen)
        fed = chosen.copy()
        fed[:, half:] = chosen[0, :half]
        np.put_along_axis(used, fed[..., None], True, axis=-1)
        positions = np.tile(np.array(lengths) + step, 2 * len(everything))
        hidden = model.forward(fed.ravel(), positions, together.attention([1] * 2 * half))
        chosen = penalised(model.logits(hidden).reshape(used.shape), used).argmax(-1)
        advance()
    history = np.stack(history)  # [steps, caches, sequences]

    def until_stop(tokens):
        return next((i for i, token in enumerate(tokens) if token in stops), len(tokens))

    answers = {}
    for index, name in enumerate(caches):
        answers[name] = []
        for prompt in range(half):
            free, reference = history[:, index, prompt], history[:, 0, prompt]
            same = history[:, index, half + prompt] == reference
            answers[name].append(Answer(free[:until_stop(free)].tolist(), same[:until_stop(reference)].tolist()))
    return answers


def penalised(logits, used, penalty=1.2):
    """Logits of used tokens moved down by the repetition penalty of CTRL (arXiv 1909.05858): a small model
    otherwise falls into loops, in which any cache agrees with any other."""
    return np.where(used, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def prompt_attention(caches, lengths):
    """The first cache stores the prompts and attends; then all store the same keys and values, twice each."""
    attend = caches[0].attention(lengths)
    stores = [cache.storage(lengths) for cache in caches[1:]]
    stores += [cache.storage([0] * len(lengths) + lengths) for cache in caches]

    def call(layer, q, k, v):
        for store in stores:
            store(layer, k, v)
        return attend(layer, q, k, v)
    return call
