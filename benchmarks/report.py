"""Writes `benchmarks/RESULTS.md` and its plots from the files in `benchmarks/measured`.

python benchmarks/report.py
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import results
import ways

mpl.use("Agg")
from matplotlib import pyplot as plt

HERE = pathlib.Path(__file__).parent
MACHINES = {"h100_2x8": "2 nodes of 8 H100", "v5e_4x4": "16 TPU v5e (4x4)"}
COMMANDS = {
    "traffic": "python benchmarks/traffic.py",
    "bytes into a node": "python benchmarks/node_traffic.py",
    "hidden gathers": "python benchmarks/overlap.py",
    "bucket sizes": "python benchmarks/buckets.py",
    "a model of MiCS on slow networks": "python benchmarks/mics_model.py",
}
NATIVE, OURS = "#9aa0a6", "#1a73e8"
Rows = list[dict[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns except the first are right-aligned."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(head), line(["---", *["---:"] * (len(head) - 1)]), *map(line, rows)])


def origin(document: dict[str, Any]) -> str:
    """Versions and machine, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{versions}; {document['machine']}; {document['date']}."


# --- step time -----------------------------------------------------------------------------------


def step_time(document: dict[str, Any]) -> str:
    """One table per optimizer, and a plot."""
    about = document["about"]
    parts = [
        "## Step time, memory and traffic on virtual CPU devices",
        f"A GPT of {about['parameters'] / 1e6:.2f} M parameters (vocabulary {about['vocabulary']}, width "
        f"{about['width']}, {about['layers']} layers), {about['batch']} texts of {about['length']} tokens over all "
        "devices. All ways for one number of devices ran in one process and took turns, step by step; the time is the "
        f"minimum of {about['rounds']} rounds.",
        "Other programs ran on the machine, and virtual devices share its cores. So compare ratios, not milliseconds, "
        "and ignore differences below a fifth. `ratio` compares with the native way that splits the same arrays.",
        "The products of Muon need whole matrices: jaxzero deals the matrices out, each to one device, native JAX "
        "distributes each product.",
        origin(document),
    ]
    for name in sorted({row["optimizer"] for row in document["rows"]}):
        mine = [row for row in document["rows"] if row["optimizer"] == name]
        parts += [f"### {name}", _dates(mine, document["date"]), _step_table(mine)]
    _plot_steps(document["rows"])
    parts.append("![Step time and memory compared with native JAX](measured/step_time.svg)")
    return "\n\n".join(parts)


def _dates(rows: Rows, written: str) -> str:
    """When the rows of an optimizer were measured: rows without a date, when the file was written."""
    worlds: dict[str, set[int]] = {}
    for row in rows:
        worlds.setdefault(row.get("date", written), set()).add(row["world"])
    parts = [f"{date} ({', '.join(map(str, sorted(worlds[date])))} devices)" for date in sorted(worlds)]
    return f"Measured on {', '.join(parts)}."


def _step_table(rows: Rows) -> str:
    head = ["way, devices", "ms", "ratio", "MB per device", "ratio", "MB sent", "compiled in s"]
    by = {(row["world"], row["way"]): row for row in rows}
    lines = []
    for row in sorted(rows, key=lambda row: (row["world"], list(ways.WAYS).index(row["way"]))):
        other = by.get((row["world"], ways.NATIVE_WAY.get(row["way"], "")))
        ratio = lambda key, row=row, other=other: f"{row[key] / other[key]:.2f}" if other else ""
        lines.append(
            [
                f"{row['way']}, {row['world']}",
                f"{row['milliseconds']:.1f}",
                ratio("milliseconds"),
                f"{row['total'] / 1e6:.2f}",
                ratio("total"),
                f"{row['sent'] / 1e6:.2f}",
                f"{row['compile_seconds']:.1f}",
            ]
        )
    return table(head, lines)


def _plot_steps(rows: Rows) -> None:
    """AdamW on the most devices."""
    most = max(row["world"] for row in rows)
    mine = {row["way"]: row for row in rows if row["world"] == most and row["optimizer"] == "adamw"}
    if not mine:
        return
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for axes, key, scale, label in (
        (both[0], "milliseconds", 1, f"ms per step, {most} virtual devices"),
        (both[1], "total", 1e6, "MB per device"),
    ):
        names = list(mine)[::-1]
        colors = [OURS if name in ways.NATIVE_WAY else NATIVE for name in names]
        axes.barh(names, [mine[name][key] / scale for name in names], color=colors)
        axes.set_xlabel(label)
    _save(figure, "step_time")


# --- predicted steps -------------------------------------------------------------------------------


def step_model(document: dict[str, Any]) -> str:
    """Measured and predicted time of each way, and how often their order agrees."""
    about, rows = document["about"], document["rows"]
    right, pairs = about["order"]
    figures = about["figures"]
    ratio = lambda row: row["predicted"] / row["measured"]
    lines = [
        [row["way"], f"{1e3 * row['measured']:.1f}", f"{1e3 * row['predicted']:.1f}", f"{ratio(row):.2f}"]
        for row in rows
    ]
    return "\n\n".join(
        [
            "## Predicted time, compared with measured steps",
            f"`jaxzero.predict` on {about['world']} virtual CPU devices, with constants measured on the same machine, "
            f"none of them fitted to a step: {figures['f32'] / 1e9:.2f} GFLOP/s and {figures['bandwidth'] / 1e9:.2f} "
            f"GB/s for each device, {1e6 * figures['launch']:.1f} us for an instruction, collectives with "
            f"{figures['local'] / 1e9:.2f} GB/s and {1e6 * figures['local_latency']:.1f} us for each step of a ring. "
            f"The step is that of the tables above, with {about['optimizer']}.",
            f"Of {pairs} pairs of ways that differ by more than 15 %, {right} are ordered right. The predicted time is "
            f"{min(map(ratio, rows)):.2f} to {max(map(ratio, rows)):.2f} of the measured one. Other "
            "programs ran on the machine. For GPUs and TPUs no prediction has been compared with a measured step.",
            origin(document),
            table(["way", "measured, ms", "predicted, ms", "ratio"], lines),
        ]
    )


# --- machines ------------------------------------------------------------------------------------


def machine(name: str, document: dict[str, Any]) -> str:
    """One table per model, and a plot."""
    parts = [f"## Compiled for {MACHINES[name]}, without the devices", origin(document)]
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        mine = [row for row in document["rows"] if row["model"] == model]
        count = document["about"][model] / 1e9
        parts += [f"### {model}, {count:.1f} B parameters", _machine_table(mine)]
    _plot_machine(name, document["rows"])
    parts.append(f"![Memory per device](measured/{name}.svg)")
    return "\n\n".join(parts)


def _machine_table(rows: Rows) -> str:
    head = ["way", "state, GB", "total, GB", "ratio", "GB sent", "gathers hidden", "compiled in s"]
    by = {row["way"]: row for row in rows}
    lines = []
    for row in rows:
        if "refused" in row:
            lines.append([row["way"], "", "does not fit", "", "", "", ""])
            continue
        other = by.get(ways.NATIVE_WAY.get(row["way"], ""), {})
        lines.append(
            [
                row["way"],
                f"{row['arguments'] / 1e9:.2f}",
                f"{row['total'] / 1e9:.2f}",
                f"{row['total'] / other['total']:.2f}" if "total" in other else "",
                f"{row['sent'] / 1e9:.1f}",
                f"{row['hidden']:.0%}",
                f"{row['seconds']:.0f}",
            ]
        )
    return table(head, lines)


def _plot_machine(name: str, rows: Rows) -> None:
    mine = [row for row in rows if "total" in row][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(mine) + 1), layout="constrained")
    names = [f"{row['model']}: {row['way']}" for row in mine]
    colors = [OURS if row["way"] in ways.NATIVE_WAY else NATIVE for row in mine]
    axes.barh(names, [row["total"] / 1e9 for row in mine], color=colors)
    axes.set_xlabel(f"GB per device, {MACHINES[name]}")
    _save(figure, name)


# --- the command line ----------------------------------------------------------------------------


def commands(documents: Sequence[dict[str, Any]]) -> str:
    """The stored output of `jaxzero compile`."""
    head = ["command, in `examples/`", "arguments, GB", "total, GB", "GB sent", "gathers hidden", "compiled in s"]
    lines = []
    for document in documents:
        (row,) = document["rows"]
        memory = row["memory"]
        lines.append(
            [
                f"`{document['about']['command']}`",
                f"{memory['arguments'] / 1e9:.2f}",
                f"{memory['total'] / 1e9:.2f}",
                f"{row['sent'] / 1e9:.1f}",
                f"{row['hidden']:.0%}",
                f"{row['seconds']:.0f}",
            ]
        )
    return "\n\n".join(["## `jaxzero compile`", *map(origin, documents[:1]), table(head, lines)])


def _save(figure: Any, name: str) -> None:
    mpl.rcParams["svg.hashsalt"] = "jaxzero"
    figure.savefig(HERE / "measured" / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Writes the page."""
    parts = [
        "# Results",
        "`make bench` writes this page and runs every benchmark that the machine can run. The tables for GPUs and TPUs "
        'need their JAX plug-ins (`pip install ".[cuda]"`, `".[tpu]"`) and no accelerator.',
        "- `total`: the memory that a device needs, which is arguments, temporaries and results, donated ones once\n"
        "- `gathers hidden`: the share of large gathers that XLA schedules with a matrix product between start and end",
        "jaxzero sums gradients in float32 by default, native JAX in their own dtype. So compare native bfloat16 with "
        "the rows `sums in bfloat16` (`reduce_dtype`). Other programs ran on the machine, so compile times are rough.",
    ]
    if document := results.read("step_time"):
        parts.append(step_time(document))
    if document := results.read("step_model"):
        parts.append(step_model(document))
    for name in MACHINES:
        if document := results.read(name):
            parts.append(machine(name, document))
    if found := [d for model in ("llama_8b", "gpt_3b") if (d := results.read(f"compile_{model}"))]:
        parts.append(commands(found))
    rest = "\n".join(f"- {what}: `{command}`" for what, command in COMMANDS.items())
    parts.append(f"## Tables that other commands print\n\n{rest}")
    (HERE / "RESULTS.md").write_text("\n\n".join(parts) + "\n")
    print("wrote benchmarks/RESULTS.md")


if __name__ == "__main__":
    main()
