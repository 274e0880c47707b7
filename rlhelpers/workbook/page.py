"""A notebook as one page of HTML that needs no network: no code, pictures inside, formulas in MathML."""

import re
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

# On paper: tables that fit the page, broken between rows and not before them.
STYLE = """<style>
td, th { text-align: left !important; }
td code { white-space: normal; overflow-wrap: anywhere; }
@media print {
  table { font-size: 8pt !important; }
  tr, img, p { break-inside: avoid; }
  h1, h2, h3, h2 + p { break-after: avoid; }
  .jp-Cell, .jp-Cell-outputWrapper, .jp-OutputArea, .jp-OutputArea-child, .jp-OutputArea-output {
    display: block !important; break-inside: auto !important; overflow: visible !important;
  }
}
</style>
"""


class _Renderer(IPythonRenderer):
    """Formulas as MathML, which browsers set themselves, where nbconvert leaves LaTeX for a script from the network."""

    def inline_math(self, body: str) -> str:
        return convert(body)

    def block_math(self, body: str) -> str:
        return convert(body, display="block")


def as_page(notebook: nbformat.NotebookNode, title: str, root: Path) -> str:
    """The executed notebook as HTML.  Pictures that its Markdown names are embedded from below `root`."""
    exporter = HTMLExporter(exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True)
    renderer = _Renderer(escape=False, embed_images=True, path=str(root))
    exporter.register_filter("markdown2html", MarkdownWithMath(renderer=renderer).render)
    notebook.metadata.title = title
    html, _ = exporter.from_notebook_node(notebook)
    # MathJax and RequireJS, which nothing here needs
    html = re.sub(r'<script src="https:[^"]*">\s*</script>', "", html)
    return html.replace("</head>", f"{STYLE}</head>", 1)
