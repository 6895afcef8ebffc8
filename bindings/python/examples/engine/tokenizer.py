"""Text to token ids and back, from the tables of a GGUF file."""

import heapq
from functools import lru_cache

import regex

from .gguf_file import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# How text is cut into words before pairs are merged: each pattern cuts the pieces of the one before.
WORDS = {
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "llama-bpe": [rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}


def load_tokenizer(file):
    kind = file.need("tokenizer.ggml.model")
    kinds = {"gpt2": BytePairTokenizer, "llama": SentencePieceTokenizer}
    if kind not in kinds:
        raise ModelError(f"{file.path}: the tokenizer '{kind}' is not known; known are {' and '.join(kinds)}.")
    return kinds[kind](file)


class Tokenizer:
    """What both kinds share: special tokens stand for themselves, all other text is left to the kind."""

    starts_by_default = False  # whether a text begins with the start token where the file does not say

    def __init__(self, file):
        self.tokens = file.need("tokenizer.ggml.tokens")
        self.types = file.get("tokenizer.ggml.token_type") or [NORMAL] * len(self.tokens)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.end = file.get("tokenizer.ggml.eos_token_id")
        bos = file.get("tokenizer.ggml.bos_token_id")
        starts = file.get("tokenizer.ggml.add_bos_token", self.starts_by_default)
        self.start = [bos] if bos is not None and starts else []
        special = [t for t, kind in zip(self.tokens, self.types) if kind in (CONTROL, USER_DEFINED) and t]
        longest_first = sorted(special, key=len, reverse=True)
        self._special = regex.compile("|".join(map(regex.escape, longest_first))) if special else None

    def encode(self, text, special=False):
        """Token ids of the text. special: names of special tokens in it become those tokens."""
        if not special or self._special is None:
            return self._encode_plain(text)
        ids, end = [], 0
        for match in self._special.finditer(text):
            ids += self._encode_plain(text[end:match.start()]) + [self.ids[match.group()]]
            end = match.end()
        return ids + self._encode_plain(text[end:])

    def decode(self, ids):
        """The text of the ids, without control tokens."""
        data = b"".join(self._bytes_of(i) for i in ids if self.types[i] != CONTROL)
        return data.decode("utf-8", errors="replace")

    def chat(self, question):
        """Token ids of one user turn in the model's own chat format, ready for the answer."""
        if "<|im_start|>" in self.ids:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        elif "<|start_header_id|>" in self.ids:
            header = "<|start_header_id|>{}<|end_header_id|>\n\n"
            text = header.format("user") + question + "<|eot_id|>" + header.format("assistant")
        else:
            text = f"[INST] {question} [/INST]"
        return self.start + self.encode(text, special=True)

    @property
    def stops(self):
        """Tokens that end an answer."""
        names = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>")
        return {self.end} | {self.ids[name] for name in names if name in self.ids}


class BytePairTokenizer(Tokenizer):
    """Byte-level byte-pair encoding: bytes stand as printable characters, ranked pairs are merged."""

    def __init__(self, file):
        super().__init__(file)
        name = file.get("tokenizer.ggml.pre", "default")
        if name not in WORDS:
            raise ModelError(f"{file.path}: the pre-tokenizer '{name}' is not known; known are {', '.join(WORDS)}.")
        self._patterns = [regex.compile(pattern) for pattern in WORDS[name]]
        self._whole_words = name == "llama-bpe"  # a word that is a token is taken as it is
        self._ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(file.need("tokenizer.ggml.merges"))}
        self._characters = byte_characters()
        self._bytes = {character: byte for byte, character in enumerate(self._characters)}
        self._merge = lru_cache(maxsize=65536)(self._merge_word)

    def _encode_plain(self, text):
        pieces = [text] if text else []
        for pattern in self._patterns:
            pieces = [part for piece in pieces for part in cut(pattern, piece)]
        return [i for piece in pieces for i in self._merge(piece)]

    def _merge_word(self, word):
        symbols = [self._characters[byte] for byte in word.encode("utf-8")]
        if self._whole_words and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            ranks = [self._ranks.get(pair, len(self._ranks)) for pair in zip(symbols, symbols[1:])]
            best = min(ranks)
            if best == len(self._ranks):
                break
            at = ranks.index(best)
            symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]

    def _bytes_of(self, i):
        if self.types[i] == USER_DEFINED:
            return self.tokens[i].encode("utf-8")
        return bytes(self._bytes[character] for character in self.tokens[i])


class SentencePieceTokenizer(Tokenizer):
    """Unigram scores used greedily: the neighbours whose union scores best are merged first."""

    starts_by_default = True

    def __init__(self, file):
        super().__init__(file)
        self._scores = file.need("tokenizer.ggml.scores")
        self._prefix = " " if file.get("tokenizer.ggml.add_space_prefix", True) else ""

    def _encode_plain(self, text):
        if not text:
            return []
        symbols = list((self._prefix + text).replace(" ", "\u2581"))
        # A linked list of symbols and a heap of the unions that are tokens, best score first, leftmost on ties.
        after = list(range(1, len(symbols))) + [None]
        before = [None] + list(range(len(symbols) - 1))
        heap = []

        def offer(left):
            right = after[left]
            if right is not None:
                union = symbols[left] + symbols[right]
                if union in self.ids:
                    heapq.heappush(heap, (-self._scores[self.ids[union]], left, union))

        for left in range(len(symbols)):
            offer(left)
        while heap:
            _, left, union = heapq.heappop(heap)
            right = after[left]
            if symbols[left] is None or right is None or symbols[left] + symbols[right] != union:
                continue  # one of the two was merged meanwhile
            symbols[left], symbols[right] = union, None
            after[left] = after[right]
            if after[right] is not None:
                before[after[right]] = left
            if before[left] is not None:
                offer(before[left])
            offer(left)
        return [i for symbol in symbols if symbol is not None for i in self._ids_of(symbol)]

    def _ids_of(self, symbol):
        if symbol in self.ids:
            return [self.ids[symbol]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode("utf-8")]

    def _bytes_of(self, i):
        if self.types[i] == BYTE:
            return bytes([int(self.tokens[i][3:5], 16)])
        return self.tokens[i].replace("\u2581", " ").encode("utf-8")

    def decode(self, ids):
        return super().decode(ids).removeprefix(self._prefix)


def cut(pattern, text):
    """The matches of the pattern and the text between them, in order."""
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            yield text[end:match.start()]
        if match.end() > match.start():
            yield match.group()
        end = match.end()
    if end < len(text):
        yield text[end:]


def byte_characters():
    """The printable character that stands for each byte: itself where it prints, else 256 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
