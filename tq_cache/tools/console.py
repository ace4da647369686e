"""What commands print where: results on standard output, bars, warnings and errors on standard error."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes beside 0


def stdout() -> Console:
    """Standard output, at least 120 wide where it is no terminal, so that tables in files and pipes are whole."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(as_json: bool, record: Callable[[], Any], *printed: Callable[[], Any]) -> None:
    """A result: its record as one line of JSON, or what is printed of it."""
    if as_json:
        print(json.dumps(record()))
    else:
        for make in printed:
            stdout().print(make())


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if that is a terminal; gives the function that moves it by one step.

    total: steps; None: not known, the bar moves by itself
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors of input as one line and exit code 2, Ctrl-C as one and 130, warnings as one line each, nothing else on
    standard error."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        except (ValueError, TypeError, NotImplementedError, OSError) as error:
            message = " ".join(str(error).split())
            console.print(f"error: {message}", markup=False)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            console.print("interrupted", markup=False)
            raise typer.Exit(INTERRUPTED) from None
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught):
                console.print(f"warning: {' '.join(message.split())}", markup=False)
