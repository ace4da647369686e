"""The loop of `tq-cache chat`: what is typed, and what is done about it."""

from collections.abc import Callable
from pathlib import Path

from transformers.generation.streamers import BaseStreamer

from .conversation import Conversation, Turn

HELP = """\
/report        what the cache holds
/save FOLDER   write it to a folder, for TurboQuantCache.from_pretrained
/reset         forget the conversation
/exit          end; so does Ctrl-D
Ctrl-C stops an answer.  A message that begins with a slash is typed with a space before it."""


def turn_line(turn: Turn, conversation: Conversation) -> str:
    """What one turn took."""
    report = conversation.cache.report()
    stopped = "stopped; " if turn.stopped else ""
    return (
        f"{stopped}{turn.answered} tokens, {turn.tokens_per_second:.1f} tokens/s; prompt: {turn.processed:,} new, "
        f"{turn.reused:,} from the cache; cache: {conversation.held:,} tokens, {report.held_line()}"
    )


def obey(line: str, conversation: Conversation, say: Callable[[str], None]) -> bool:
    """Do what a line with a command says; whether the conversation goes on.  Raises ValueError on unknown ones."""
    command, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if command == "/exit":
        return False
    if command == "/help":
        say(HELP)
    elif command == "/report":
        say(str(conversation.cache.report()))
    elif command == "/reset":
        conversation.reset()
        say("the conversation is forgotten")
    elif command == "/save" and argument:
        count = conversation.save(Path(argument).expanduser())
        say(f"{count:,} tokens saved in {argument}")
    elif command == "/save":
        raise ValueError("expected a folder after /save, got none")
    else:
        raise ValueError(f"expected /report, /save FOLDER, /reset, /exit or /help, got {command!r}")
    return True


def answer(line: str, conversation: Conversation, streamer: BaseStreamer, note: Callable[[str], None]) -> None:
    """Answer a message as it is streamed, then note what that took."""
    note(turn_line(conversation.ask(line.strip(), streamer), conversation))
