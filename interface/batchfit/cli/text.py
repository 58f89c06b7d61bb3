"""The report as text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from batchfit.estimator import Budget, Category, Outcome

from .console import Table, facts, plain_bytes, render, width
from .plan import Plan
from .report import ANY, Column, Report, Row, short_by
from .targets import Target

# Rows of the module table.
_MODULES = 20
_ROW_LABEL = 18
_CELL = 9


def as_text(report: Report) -> str:
    """What ``batchfit estimate`` prints."""
    parts: list[RenderableType] = [*_header(report), ""]
    if len(report.columns) == 1:
        parts += _one_gpu(report)
    else:
        parts += _several_gpus(report)
    if report.plan.layers:
        parts += _layers(report)
    return render(*parts)


def _header(report: Report) -> list[RenderableType]:
    title = Text(report.target.text, style="bold")
    if len(report.columns) == 1:
        title.append(f" on {report.columns[0].name}")
    words = settings_in_words(report.target, report.plan.settings)
    return [title, Text(words, style="dim")]


def settings_in_words(target: Target, allocator: str) -> str:
    """The inputs and settings of a target, and the allocator's if there are any."""
    said = target.workload.describe()
    words = [target.inputs, said["form"], said.get("precision")]
    if said["form"] == "training":
        words += [said["optimizer"] or "no optimizer", _loss(said["loss"])]
    if said.get("memory_format", "contiguous") != "contiguous":
        words.append(said["memory_format"])
    if said.get("checkpointing"):
        words.append("checkpointing")
    if said.get("accumulate", 1) > 1:
        words.append(f"{said['accumulate']} micro-batches per step")
    if said["form"] == "training":
        words += [] if said["set_to_none"] else ["gradients zeroed in place"]
        if said["clip_grad_norm"] is not None:
            words.append(f"gradients clipped at {said['clip_grad_norm']:g}")
        words += [] if said["keep_outputs"] else ["outputs not kept"]
        words += ["EMA"] if said["ema"] else []
        words += ["evaluation pass"] if said["evaluate"] else []
    words += [f"allocator {allocator}"] if allocator else []
    return ", ".join(word for word in words if word)


def _loss(name: str) -> str:
    return {"model": "the model's loss", "auto": "loss as the outputs ask"}.get(name, name)


def _one_gpu(report: Report) -> list[RenderableType]:
    column = report.columns[0]
    answer = Text(_answer(column, report.plan.smallest), style=_colour(column.answer.batch > 0))
    rows: list[tuple[str, str | Text]] = [("largest batch", answer)]
    if column.answer.with_workspaces < column.answer.batch:
        rows.append(("full speed", _full_speed(column.answer.with_workspaces)))
    if report.plan.batches and report.plan.asked:
        for row in column.rows:
            verdict = Text(_verdict(row, column.budget), style=_colour(row.fits))
            rows.append((f"batch {row.batch}", verdict))
            if row.out_of_memory:
                rows.append(("", f"as PyTorch would put it: {row.out_of_memory}"))
    rows.append(("budget", _budget(column.budget)))
    last = column.rows[-1]
    below = [(f"peak at {last.batch}", _moment(last)), *_remarks(report, last)]
    return [facts(rows), "", *_breakdowns(column), "", facts(below)]


def _full_speed(batch: int) -> str:
    return (
        f"{batch if batch else 'none'}: up to there cuDNN gets the workspaces it asks for; above, "
        "convolutions make do with less, and may be slower"
    )


def _colour(good: bool) -> str:
    return "green" if good else "red"


def _answer(column: Column, smallest: int) -> str:
    """The answer in words."""
    answer = column.answer
    if answer.outcome is Outcome.DOES_NOT_FIT:
        parts = column.estimate.breakdown(smallest)
        return (
            f"none: does not fit even at {smallest}: "
            f"{_needs(answer.peak, answer.reserved, answer.budget)}; {_most(parts)}"
        )
    if answer.batch > ANY:
        return "fits at any size you would use"
    if answer.outcome is Outcome.UNLIMITED:
        return (
            f"{answer.batch}; memory is not the limit: in larger batches a tensor has more "
            "elements than 32-bit indices can count"
        )
    what = " (your limit)" if answer.outcome is Outcome.CAPPED else ""
    return f"{answer.batch}{what}, which allocates {plain_bytes(answer.peak)}"


def _most(parts: dict[Category, int]) -> str:
    category = max(parts, key=lambda c: parts[c])
    return f"the largest part is {category}, {plain_bytes(parts[category])}"


def _verdict(row: Row, budget: Budget) -> str:
    if not row.fits:
        return f"does not fit: {_needs(row.peak, row.reserved, budget)}; {_most(row.breakdown)}"
    below = plain_bytes(budget.bytes - row.peak)
    return f"fits: {plain_bytes(row.peak)} allocated, {below} below the budget"


def _needs(peak: int, reserved: int, budget: Budget) -> str:
    over = short_by(peak, reserved, budget)
    if peak > budget.bytes:
        return f"{plain_bytes(peak)} allocated, {plain_bytes(over)} more than the budget"
    return (
        f"{plain_bytes(peak)} allocated, but {plain_bytes(reserved)} reserved with gaps that the "
        f"allocator cannot use, {plain_bytes(over)} more than the budget"
    )


def _budget(budget: Budget) -> str:
    if not budget.context and not budget.margin:
        return f"{plain_bytes(budget.bytes)}, as given"
    return (
        f"{plain_bytes(budget.bytes)} = {plain_bytes(budget.total)} total - "
        f"{plain_bytes(budget.context)} context - {plain_bytes(budget.margin)} margin"
    )


def _moment(row: Row) -> str:
    where = f" in {row.moment.module}" if row.moment.module else ""
    operator = row.moment.operator.removeprefix("aten::")
    return f"{row.moment.phase}, {operator}{where}"


def _breakdowns(column: Column) -> list[RenderableType]:
    """Peak and categories, one column per batch size; several tables where they are too many."""
    per_table = max(1, (width() - _ROW_LABEL) // (_CELL + 2))
    parts: list[RenderableType] = []
    for start in range(0, len(column.rows), per_table):
        rows = column.rows[start : start + per_table]
        table = Table(["batch", *(str(row.batch) for row in rows)])
        table.row("peak reserved", *(plain_bytes(row.reserved_here) for row in rows))
        table.row("peak allocated", *(plain_bytes(row.peak) for row in rows), style="bold")
        for category in Category:
            cells = [row.breakdown.get(category, 0) for row in rows]
            if any(cells):
                table.row(f"  {category}", *(plain_bytes(cell) if cell else "-" for cell in cells))
        parts += [*([""] if parts else []), table.rich()]
    return parts


def _remarks(report: Report, row: Row) -> list[tuple[str, str]]:
    rows = []
    if row.least < row.peak:
        rows.append(
            (
                "cuDNN",
                f"{plain_bytes(row.peak)} at {row.batch} counts the workspaces that cuDNN asks for "
                f"first; where it takes none it is {plain_bytes(row.least)}",
            )
        )
    if report.sums is not None:
        total = plain_bytes(report.sums.torchinfo_total(row.batch))
        rows.append(
            (
                "torchinfo",
                f"{total} at {row.batch}, against {plain_bytes(row.peak)} here: it counts each "
                "layer's output twice, and no functional operators, temporaries, gradients or "
                "optimizer state",
            )
        )
    return rows + [("note", note) for note in report.notes]


def _several_gpus(report: Report) -> list[RenderableType]:
    """One column per GPU; several tables where they are too many for the width."""
    parts: list[RenderableType] = []
    columns = list(report.columns)
    while columns:
        taken = 0
        used = _ROW_LABEL
        while taken < len(columns) and (
            not taken or used + max(len(columns[taken].name), _CELL) + 2 <= width()
        ):
            used += max(len(columns[taken].name), _CELL) + 2
            taken += 1
        now, columns = columns[:taken], columns[taken:]
        parts += [*([""] if parts else []), _gpu_table(now, report.plan).rich()]
    unusual = (Outcome.DOES_NOT_FIT, Outcome.UNLIMITED)
    rows = [
        (c.name, _answer(c, report.plan.smallest))
        for c in report.columns
        if c.answer.outcome in unusual
    ]
    if report.plan.batches and report.plan.asked:
        rows += [
            (c.name, f"batch {row.batch}, as PyTorch would put it: {row.out_of_memory}")
            for c in report.columns
            for row in c.rows
            if row.out_of_memory
        ]
    first = report.columns[0].rows[-1]
    return [*parts, "", facts(rows + _remarks(report, first))]


def _gpu_table(columns: list[Column], plan: Plan) -> Table:
    table = Table(["", *(column.name for column in columns)])
    if any(c.budget.context for c in columns):
        table.row("memory", *(plain_bytes(c.budget.total) for c in columns))
    table.row("budget", *(plain_bytes(c.budget.bytes) for c in columns))
    table.row("largest batch", *(_short_answer(c) for c in columns), style="bold")
    if any(c.answer.with_workspaces < c.answer.batch for c in columns):
        table.row("  at full speed", *(str(c.answer.with_workspaces) for c in columns))
    table.row("  allocates", *(plain_bytes(c.answer.peak) for c in columns))
    table.row("  reserves", *(plain_bytes(c.reserved) for c in columns))
    if plan.batches:
        for i, row in enumerate(columns[0].rows):
            table.row(f"batch {row.batch}", *("fits" if c.rows[i].fits else "no" for c in columns))
            table.row("  allocates", *(plain_bytes(c.rows[i].peak) for c in columns))
            table.row("  reserves", *(plain_bytes(c.rows[i].reserved_here) for c in columns))
    return table


def _short_answer(column: Column) -> str:
    if column.answer.outcome is Outcome.DOES_NOT_FIT:
        return "none"
    return "any" if column.answer.batch > ANY else str(column.answer.batch)


def _layers(report: Report) -> list[RenderableType]:
    row = report.columns[0].rows[-1]
    parts: list[RenderableType] = []
    if report.sums is not None:
        tree = Table(["layer (torchinfo)", "parameters", "output/sample"])
        for layer in report.sums.layers:
            name = layer.path.rpartition(".")[2]
            title = f"{name} ({layer.kind})" if name else layer.kind
            tree.row(
                "  " * layer.depth + title,
                f"{layer.parameters:,}" if layer.parameters else "-",
                plain_bytes(layer.output_bytes_per_sample),
            )
        parts += ["", tree.rich()]
    table = Table([f"module, at the peak of batch {row.batch}", "bytes", "share"])
    modules = report.modules()
    for path, size in list(modules.items())[:_MODULES]:
        table.row(path or "(no module)", plain_bytes(size), f"{100 * size / row.peak:.1f} %")
    rest = sum(list(modules.values())[_MODULES:])
    if rest:
        more = len(modules) - _MODULES
        table.row(f"{more} others", plain_bytes(rest), f"{100 * rest / row.peak:.1f} %")
    return [*parts, "", table.rich()]
