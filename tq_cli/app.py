"""The commands, in the order in which `--help` lists them."""

from typing import Annotated

import typer

from . import measure, saved, talk
from .arguments import print_version

app = typer.Typer(
    name="tq-cache",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A quantised KV cache for Hugging Face transformers.  Exit codes: 0; 2 on bad input; 130 after Ctrl-C."""


app.command()(measure.demo)
app.command()(talk.generate)
app.command()(talk.chat)
app.command()(measure.info)
app.command()(measure.plan)
app.command("eval")(measure.evaluate)
app.command("lm-eval")(measure.lm_eval)
app.add_typer(saved.app, name="cache")
