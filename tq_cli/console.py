"""What commands print where: results on standard output, bars, warnings and errors on standard error."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes beside 0
INPUT_ERRORS = (ValueError, TypeError, NotImplementedError, OSError)


def stdout() -> Console:
    """Standard output, at least 120 wide where it is no terminal, so that tables in files and pipes are whole."""
    return Console(width=None if sys.stdout.isatty() else 120)


def stderr() -> Console:
    """Standard error."""
    return Console(stderr=True, soft_wrap=True, highlight=False)


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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


def print_error(error: BaseException) -> None:
    """One line on standard error."""
    stderr().print(f"error: {' '.join(str(error).split())}", markup=False)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Prints each warning once, at the end, as one line on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught):
                stderr().print(f"warning: {' '.join(message.split())}", markup=False)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors of input as one line and exit code 2, Ctrl-C as one and 130, warnings as one line each, nothing else on
    standard error."""
    try:
        _quiet_libraries()
        with warnings_as_lines():
            yield
    except INPUT_ERRORS as error:
        print_error(error)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        stderr().print("interrupted", markup=False)
        raise typer.Exit(INTERRUPTED) from None


def _quiet_libraries() -> None:
    """No logs and no bars but our own."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers reads GGUF files with a bar that nothing else turns off

    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
