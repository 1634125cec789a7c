"""Formats log lines: as text for users, or as one JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, TextIO

Format = Literal["text", "json"]
FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

_LOG: Final = logging.getLogger(__name__)
_SUBJECTS: Final = ("resource", "driver")
"""If the first value in a record's `extra` has one of these names, the text line begins with this value."""
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def setup(format: Format = "text", level: str = "info", stream: TextIO | None = None) -> None:  # noqa: A002
    """Make the root logger write only to `stream` (by default standard error).

    Raises ValueError for an unknown format or level.
    """
    if format not in FORMATS or level not in LEVELS:
        raise ValueError(f"logs are {' or '.join(FORMATS)}, at {', '.join(LEVELS)}; not {format!r} at {level!r}")
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(short=stream.isatty()))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    # Without these hooks, Python would write unhandled exceptions as bare tracebacks, not in the log's format.
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable
    # Only warnings and errors of these libraries are logged.
    for library in ("asyncio", "grpc", "watchdog", "aiohttp"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        _LOG.critical("unhandled exception, the process ends", exc_info=(kind, error, traceback))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "unknown"
        error = args.exc_value or args.exc_type()
        _LOG.error("thread %s ended by an error", name, exc_info=(args.exc_type, error, args.exc_traceback))


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    error = args.exc_value or args.exc_type()
    _LOG.error(
        "%s: %r", args.err_msg or "exception ignored", args.object, exc_info=(args.exc_type, error, args.exc_traceback)
    )


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # The arguments may not fit the message's placeholders, or their `__str__` may raise anything.
        return str(record.msg)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the values that the caller passed as `extra`: resource, driver, device, claim and pod of the log line."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: ts (RFC 3339, UTC), level, logger, msg, exc, and the values in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        # The line begins with these fields, because people read JSON logs as well.
        own = {
            "ts": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": _message(record),
        }
        line = own | _fields(record) | own
        if exc := _exception(self, record):
            line["exc"] = exc
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except Exception:  # JSON cannot represent some values: keys that are not text, cycles, some numbers.
            return json.dumps({name: _text(value) for name, value in line.items()})


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # The `__str__` of a library's object may raise any exception.
        return f"<{type(value).__name__}>"


class TextFormatter(logging.Formatter):
    """Formats a text line. short: whether the line has only the time of day (for a terminal), not the date."""

    def __init__(self, *, short: bool = False) -> None:
        super().__init__()
        self._short = short

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a text line, followed by its traceback if it has one."""
        at = datetime.fromtimestamp(record.created).astimezone()
        when = f"{at:%H:%M:%S}.{at.microsecond // 1000:03}" if self._short else at.isoformat(timespec="milliseconds")
        logger = record.name.removeprefix("deviceplugin.")
        message = _message(record)
        fields = {name: _text(value) for name, value in _fields(record).items()}
        if (subject := next(iter(fields), "")) in _SUBJECTS:
            message = f"{fields.pop(subject)}: {message}"
        more = "".join(f" {name}={value}" for name, value in fields.items() if value not in message)
        line = f"{when} {record.levelname:<7} {logger}: {message}{more}"
        exc = _exception(self, record)
        return f"{line}\n{exc}" if exc else line


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)
