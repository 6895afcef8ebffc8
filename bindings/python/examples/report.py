"""What the demo found: as text, as pictures, and as one HTML page that holds them."""

import base64
from html import escape

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BASELINE = "f16"
AXIS_COLUMNS = [
    ("key_error", "key"), ("score_error", "score"), ("attention_kl", "attention KL"), ("value_error", "value"),
    ("output_error_key", "output, K only"), ("output_error_value", "output, V only"), ("output_error", "output"),
]
GREY = "#9a9a9a"
PALETTE = ["#4d4d4d", "#0072b2", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#56b4e9"]

plt.rcParams.update({
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11,
    "axes.titlelocation": "left", "figure.dpi": 130, "savefig.bbox": "tight", "legend.frameon": False,
})


# ---- Tables, as rows of strings; the first row is the heading ---------------------------------------------


def preset_table(result):
    baseline = result["presets"][0]
    table = [["preset", "bits per element", "cache MiB", "of fp16", "perplexity", "change", "KL", "same top token",
              "agreement", "attention tokens/s", "of fp16"]]
    for row in result["presets"]:
        table.append([
            row["preset"], f"{row['bits_per_element']:.2f}", f"{row['live_bytes'] / 2**20:.1f}",
            f"{100 * row['live_bytes'] / baseline['live_bytes']:.0f} %", f"{row['perplexity']:.2f}",
            f"{change(row, baseline):+.2f} %", f"{row['kl']:.4f}", f"{100 * row['top1']:.1f} %",
            f"{100 * row['agreement']:.1f} %", f"{row['attend_tokens_per_second']:.0f}",
            f"{row['attend_tokens_per_second'] / baseline['attend_tokens_per_second']:.2f}x",
        ])
    return table


def axis_table(result):
    table = [["K axis", "V axis", "sinks", "recent"] + [title for _, title in AXIS_COLUMNS]]
    for row in result["axes"]:
        table.append([row["k_axis"], row["v_axis"], str(row["sink"]), str(row["recent"])] +
                     [error(row, name) for name, _ in AXIS_COLUMNS])
    return table


def change(row, baseline):
    return 100 * (row["perplexity"] / baseline["perplexity"] - 1)


def error(row, name):
    return f"{row[name]:.3f}" if name == "attention_kl" else f"{100 * row[name]:.1f} %"


# ---- Sentences shared by the text and the page ------------------------------------------------------------


def presets_note(result):
    about = result["about"]
    return (f"{about['windows']} windows of {about['window_tokens']} tokens of {about['text']}, decoded token by token "
            f"as one batch; positions from {about['scored_from']} on are scored. f16 is the library's own "
            "full-precision cache. KL: of the next-token distribution against f16, nats. Agreement: of greedy tokens "
            "with f16, given f16's answer so far (repeated tokens made less likely by a factor of 1.2). Cache: what attention reads at the end, windows included. Attention: "
            "tokens of one sequence a second through the attend calls of all layers, from the lower quartiles of "
            "32 stretches of the windows.")


def axes_note(result):
    p = result["about"]["probe"]
    layers = "all layers" if p["every"] == 1 else f"every {p['every']}th layer"
    return (f"The model's own queries, keys and values: {p['tokens']} tokens, the last {p['queries']} queries, mean over "
            f"{layers}; {p['bits']} bits, groups of {p['group']}. Errors are relative (Frobenius norms), scores "
            f"centred per query, KL in nats. Attention is sparse: {100 * result['axes'][0]['sparsity']:.0f} % of the "
            "exact weights are below 1 % of their row's maximum.")


def about_note(result):
    about = result["about"]
    gpu = f", caches on {about['gpu']}: arrays go there and back in each call" if about["gpu"] else ""
    return f"{about['date']}, {about['cpu']}{gpu}; {about['build']}; commit {about['commit']}; {result['seconds']} s."


def agreement_line(answer, label):
    total = answer["tokens"]
    return (f"{label}: given the reference's tokens, the same next token {answer['agreeing'][label]} of {total} times; "
            f"on its own, the same for {answer['same_until'][label]} tokens")


# ---- Text -------------------------------------------------------------------------------------------------


def as_text(result):
    parts = [result["about"]["model"], ""]
    for answer in result["answers"]:
        parts += [f"> {answer['question']} ({answer['prompt_tokens']} tokens of prompt)", ""]
        for label, text in answer["texts"].items():
            parts += [f"[{agreement_line(answer, label)}]", *(f"    {line}" for line in text.splitlines()), ""]
    parts += [columns(preset_table(result)), "", presets_note(result), ""]
    parts += [columns(axis_table(result)), "", axes_note(result), ""]
    for ordering in result["orderings"]:
        parts.append(f"{'yes' if ordering['holds'] else 'NO '}  {ordering['claim']} {ordering['evidence']}")
    return "\n".join(parts)


def columns(table):
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths))) for row in table)


# ---- Pictures ---------------------------------------------------------------------------------------------


def draw(result, out):
    draw_quality(result, out / "quality.png")
    draw_memory(result, out / "memory.png")
    draw_speed(result, out / "attention.png")
    draw_axes(result, out / "axes.png")


def draw_quality(result, path):
    baseline, *others = result["presets"]
    figure, panels = plt.subplots(1, 3, figsize=(12, 0.42 * len(others) + 1.2), sharey=True)
    names = [row["preset"] for row in others]
    bars(panels[0], names, [change(row, baseline) for row in others], "{:+.1f} %", "perplexity change, %")
    bars(panels[1], names, [row["kl"] for row in others], "{:.4f}", "KL of the next token, nats")
    bars(panels[2], names, [100 * row["agreement"] for row in others], "{:.1f} %", "agreeing tokens, %")
    panels[2].set_xlim(0, 120)  # room for the figures beside the bars
    panels[2].set_xticks(range(0, 101, 25))
    panels[0].set_title("Loss against full precision")
    panels[2].set_title("Generated tokens")
    figure.savefig(path)
    plt.close(figure)


def draw_memory(result, path):
    names = [row["preset"] for row in result["presets"]]
    figure, panel = plt.subplots(figsize=(7, 0.42 * len(names) + 1))
    share = [100 * row["live_bytes"] / result["presets"][0]["live_bytes"] for row in result["presets"]]
    bars(panel, names, share, "{:.0f} %", "bytes of the cache, % of fp16")
    about = result["about"]
    panel.set_title(f"Cache of {about['windows']} sequences of {about['window_tokens']} tokens, windows included")
    figure.savefig(path)
    plt.close(figure)


def bars(panel, names, values, form, label):
    drawn = panel.barh(names, values, color=[PALETTE[1] if name != BASELINE else GREY for name in names], height=0.62)
    panel.bar_label(drawn, [form.format(value) for value in values], padding=4, fontsize=9)
    panel.set_xlabel(label)
    panel.margins(x=0.25)
    if not panel.yaxis_inverted():
        panel.invert_yaxis()
    panel.tick_params(axis="y", length=0)


def draw_speed(result, path):
    figure, panel = plt.subplots(figsize=(8, 4.2))
    context = result["step_us"]["context"]
    for row, colour in zip(result["presets"], PALETTE):
        name = row["preset"]
        panel.plot(context, result["step_us"][name], color=colour, label=name,
                   linestyle="--" if name == BASELINE else "-", linewidth=1.6)
    panel.set_xlabel("context, tokens")
    panel.set_ylabel("attention, \u00b5s a token (all layers)")
    panel.set_ylim(bottom=0)
    panel.set_title("Time of the attention by context")
    panel.legend(loc="upper left", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def draw_axes(result, path):
    shown = [("key_error", "key error, %"), ("score_error", "score error, %"), ("attention_kl", "attention KL, nats"),
             ("value_error", "value error, %"), ("output_error_value", "output error, V only, %"),
             ("output_error", "output error, %")]
    pairs = list(dict.fromkeys((row["k_axis"], row["v_axis"]) for row in result["axes"]))
    windows = list(dict.fromkeys((row["sink"], row["recent"]) for row in result["axes"]))
    table = {(row["k_axis"], row["v_axis"], row["sink"], row["recent"]): row for row in result["axes"]}
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.4), sharex=True)
    width = 0.8 / len(windows)
    for panel, (name, title) in zip(panels.flat, shown):
        for i, (sink, recent) in enumerate(windows):
            factor = 1 if name == "attention_kl" else 100
            heights = [factor * table[(*pair, sink, recent)][name] for pair in pairs]
            panel.bar([x + (i - 1.5) * width for x in range(len(pairs))], heights, width * 0.9, color=PALETTE[1:][i],
                      label=window_name(sink, recent))
        panel.set_title(title)
        panel.set_xticks(range(len(pairs)), [f"K {k}\nV {v}" for k, v in pairs], fontsize=9)
        panel.tick_params(axis="x", length=0)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, bbox_to_anchor=(0.5, 1.0))
    figure.subplots_adjust(top=0.87, hspace=0.25)
    figure.savefig(path)
    plt.close(figure)


def window_name(sink, recent):
    kept = [f"{sink} sinks"] * bool(sink) + [f"{recent} recent"] * bool(recent)
    return " and ".join(kept) or "no windows"


INTRODUCTION = (
    "While a transformer generates, it keeps the keys and values of every token so far: its cache. libkivi packs them in 2 to "
    "4 bits and computes attention straight from the packed form. Here the same model generates and reads a text once with a "
    "cache in fp16 and once with each preset; k3v2, for example, keeps keys in 3 bits and values in 2. Columns compare with "
    "the fp16 cache of the same run.")

# ---- The page ---------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1120px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 0.9em; } td, th { padding: 0.25em 0.7em; text-align: right; }
td { white-space: nowrap; }
th { border-bottom: 1px solid #888; font-weight: 600; vertical-align: bottom; } tr:nth-child(odd) td { background: #f5f5f5; }
td:first-child, th:first-child { text-align: left; }
.wide { overflow-x: auto; } .note { color: #666; font-size: 0.9em; max-width: 60em; } img { max-width: 100%; }
.answer { border-left: 3px solid #ccc; padding: 0.2em 1em; margin: 0.8em 0; white-space: pre-wrap; }
.who { font-size: 0.85em; color: #666; white-space: normal; }
"""


def write_html(result, out):
    about = result["about"]
    body = [
        f"<h1>{escape(about['model'])} on a packed cache</h1>",
        f"<p>{escape(INTRODUCTION)}</p>",
        f"<p class=note>{escape(about_note(result))}</p>",
        "<h2>Presets</h2>", html_table(preset_table(result)), f"<p class=note>{escape(presets_note(result))}</p>",
        picture(out / "quality.png", "perplexity change, KL and agreement of each preset"),
        picture(out / "memory.png", "bytes of the cache of each preset against fp16"),
        picture(out / "attention.png", "time of the attention by context for each preset"),
        "<h2>Which axis to group along</h2>", html_table(axis_table(result)),
        f"<p class=note>{escape(axes_note(result))}</p>",
        picture(out / "axes.png", "errors of the four pairs of axes under four choices of windows"),
        "<h2>Do the orderings behind the design show on this model?</h2><ul>",
        *(f"<li><b>{'Yes' if o['holds'] else 'No'}.</b> {escape(o['claim'])} <span class=note>"
          f"{escape(o['evidence'])}</span></li>" for o in result["orderings"]),
        "</ul><h2>Generated text</h2>",
    ]
    for answer in result["answers"]:
        body.append(f"<h3>{escape(answer['question'])}</h3><p class=note>{answer['prompt_tokens']} tokens of prompt with "
                    "a passage of the text</p>")
        for label, text in answer["texts"].items():
            body.append(f"<div class=answer><div class=who>{escape(agreement_line(answer, label))}</div>"
                        f"{escape(text)}</div>")
    page = (f"<!doctype html><html lang=en><meta charset=utf-8><title>kivi: {escape(about['model'])}</title>"
            f"<style>{STYLE}</style><body>" + "\n".join(body) + "</body></html>\n")
    (out / "demo.html").write_text(page, encoding="utf-8")


def html_table(table):
    head, *rows = table
    lines = ["<div class=wide><table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join(lines) + "</table></div>"


def picture(path, words):
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{escape(words)}" src="data:image/png;base64,{data}"></p>'
