"""Report files of a sweep: tables in Markdown and LaTeX, figures as SVG, and one self-contained HTML page."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

import zendaya
from zendaya.errors import ZendayaError
from zendaya.files import write_atomically
from zendaya.research.report import questions, tables
from zendaya.research.report.figures import Panel, draw, panels
from zendaya.research.report.layout import Bold, Sheet
from zendaya.research.report.results import Results

Format = Literal["md", "latex", "html"]
MARKDOWN, LATEX, HTML = "report.md", "tables.tex", "report.html"


def write_report(
    folder: str | Path, *, to: str | Path | None = None, formats: Sequence[Format] = get_args(Format), force: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> list[Path]:  # fmt: skip
    """Write the report of a sweep and give the files written; `report` is called with a line before each slow scoring."""
    for name in formats:
        if name not in get_args(Format):
            raise ZendayaError(f"unknown report format: expected one of {', '.join(get_args(Format))}, got {name!r}")
    results = Results(folder, report)
    out = Path(to).expanduser() if to is not None else results.folder / "report"
    shown = list(panels(results))
    named = {"offline": "Offline quality against γ", "streaming": "Quality against average lagging"}
    figures = [name for name in named if any(panel.figure == name for panel in shown)] if "md" in formats or "latex" in formats else []
    texts = [file for kind, file in (("md", MARKDOWN), ("latex", LATEX), ("html", HTML)) if kind in formats]
    wanted = [*(f"{name}.svg" for name in figures), *texts]
    if not force and (there := [name for name in wanted if (out / name).exists()]):
        raise ZendayaError(f"{out}: already holds {', '.join(there)}; give --force to replace them, or another --to")
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ZendayaError(f"{place}: not a writable folder; give another --to")
    made = [*tables.sheets(results), *questions.sheets(results), tables.every(results)]
    title, note = f"Results of {', '.join(sorted({row.grid for row in results.rows}))}", _note(results)
    contents: dict[str, bytes] = {f"{name}.svg": draw([p for p in shown if p.figure == name], named[name]) for name in figures}
    if "md" in formats:
        contents[MARKDOWN] = markdown(made, title, note, {f"{name}.svg": named[name] for name in figures}).encode()
    if "latex" in formats:
        contents[LATEX] = latex(made, note).encode()
    if "html" in formats:
        contents[HTML] = page(made, shown, title, note).encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, data in contents.items():
            write_atomically(out / file, data)
    except OSError as error:
        raise ZendayaError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    return [out / name for name in contents]


def _note(results: Results) -> str:
    decodes, runs = ({getattr(row, name) for row in results.rows} for name in ("cell", "run"))
    failed = f" {len(results.failed)} cells failed and are missing." if results.failed else ""
    data = ", ".join(sorted({f"{row.corpus} {row.data_digest[:12]}" for row in results.rows}))
    implementations = sorted({text for row in results.rows if "|" in (text := str(results.signature(row)["metric"]))})
    return (
        f"zendaya {zendaya.__version__}; {len(decodes)} decodes of {len(runs)} runs; data {data}. Scores are fractions: "
        f"{'; '.join(implementations)}.{failed} – is missing: not run or not measured."
    )


# Markdown.


def markdown(made: Sequence[Sheet], title: str, note: str, figures: dict[str, str]) -> str:
    """The report as one page of Markdown."""
    parts = [f"# {title}", note, *(f"![{words}]({name})" for name, words in figures.items())]
    for sheet in made:
        rows = [_markdown_row((*row, *("" for _ in sheet.header[len(row) :]))) for row in sheet.rows]
        table = [_markdown_row(sheet.header), "|" + "---|" * len(sheet.header), *rows]
        parts += [f"## {sheet.name}", sheet.caption, "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    texts = (re.sub(r"([\\|*])", r"\\\1", cell).replace("\n", " ") for cell in cells)
    return "| " + " | ".join(f"**{text}**" if isinstance(cell, Bold) else text for cell, text in zip(cells, texts, strict=True)) + " |"


# LaTeX.

_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "γ→0": r"$\gamma\to0$", "γ": r"$\gamma$", "ρ": r"$\rho$", "Ē": r"$\bar{E}$",
    "Δ": r"$\Delta$", "±": r"$\pm$", "−": "$-$", "–": "--", "≈": r"$\approx$", "→": r"$\to$", "<": "$<$", ">": "$>$", "Ω": r"$\Omega$",
    "≤": r"$\leq$", "×": r"$\times$", "N̂": r"$\hat{N}$",
}  # fmt: skip


def tex(text: str) -> str:
    """Text escaped for LaTeX; other characters are left to the compiler's input encoding."""
    longest_first = sorted(_TEX, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: _TEX[found[0]], text)


def latex(made: Sequence[Sheet], note: str) -> str:
    """The tables, for \\input; they need the packages booktabs, graphicx and array."""
    parts = [f"% {note}", "% \\usepackage{booktabs,graphicx,array}"]
    for sheet in made:
        columns = len(sheet.header)
        wide = sheet.name == "Table A2"
        layout = ">{\\raggedright\\arraybackslash}p{0.3\\textwidth}" * columns if wide else "l" + "c" * (columns - 1)
        lines = [" & ".join(tex(text) for text in sheet.header) + r" \\", r"\midrule"]
        for row in sheet.rows:
            if len(row) == 1 < columns:
                lines.append(rf"\multicolumn{{{columns}}}{{@{{}}l@{{}}}}{{{_tex_cell(row[0])}}} \\")
            else:
                cells = " & ".join(map(_tex_cell, row))
                lines.append(("{}" if cells.startswith("[") else "") + cells + r" \\")  # [ after a line break would be read as its argument
        tabular = "\n".join([rf"\begin{{tabular}}{{@{{}}{layout}@{{}}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"])
        fitted = tabular if wide else rf"\resizebox{{\ifdim\width>\textwidth\textwidth\else\width\fi}}{{!}}{{%{chr(10)}{tabular}}}"
        caption = rf"\caption{{{tex(sheet.caption)}}}"
        parts.append("\n".join([f"% {sheet.name}", r"\begin{table*}[t]", r"\centering", r"\scriptsize", fitted, caption, r"\end{table*}"]))
    return "\n\n".join(parts) + "\n"


def _tex_cell(cell: str) -> str:
    return rf"\textbf{{{tex(cell)}}}" if isinstance(cell, Bold) else tex(cell)


# HTML.


def page(made: Sequence[Sheet], shown: Sequence[Panel], title: str, note: str) -> str:
    """One self-contained page with tables and interactive plots."""
    data = json.dumps([asdict(panel) for panel in shown], ensure_ascii=False).replace("</", "<\\/")
    tables = "\n".join(map(_html_table, made))
    text = (files("zendaya.research.report") / "page.html").read_text(encoding="utf-8")
    for mark, value in (("@TITLE@", html.escape(title)), ("@NOTE@", html.escape(note)), ("@TABLES@", tables), ("@DATA@", data)):
        text = text.replace(mark, value)
    return text


def _html_table(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in sheet.header)
    wrap = ' class="wrap"' if sheet.name == "Table A2" else ""
    rows = []
    for row in sheet.rows:
        if len(row) == 1 < len(sheet.header):
            rows.append(f'<tr><th colspan="{len(sheet.header)}">{html.escape(row[0])}</th></tr>')
        else:
            cells = (f"<b>{html.escape(cell)}</b>" if isinstance(cell, Bold) else html.escape(cell) for cell in row)
            rows.append("<tr>" + "".join(f"<td{wrap}>{cell}</td>" for cell in cells) + "</tr>")
    return (
        f'<h3>{html.escape(sheet.name)}</h3><div class="scroll"><table><caption>{html.escape(sheet.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
