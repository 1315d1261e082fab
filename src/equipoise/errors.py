"""Errors that users may catch: one family, each with the exit code of the CLI."""

from typing import ClassVar


class EquipoiseError(Exception):
    """Base of every error raised on purpose: says what, where, and what to try next."""

    exit_code: ClassVar[int] = 1


class InputError(EquipoiseError, ValueError):
    """Something the user gave cannot be used: a shape, a dtype, a file, an option."""

    exit_code: ClassVar[int] = 2


class RunFileError(EquipoiseError):
    """A run file is missing, in use by another writer, newer than us, or not ours."""

    exit_code: ClassVar[int] = 3


class SilentSiteError(EquipoiseError):
    """Something that runs cannot be read; raised by ``watch(strict=True)`` only."""

    exit_code: ClassVar[int] = 4


class MissingExtraError(EquipoiseError, ImportError):
    """An optional dependency is not installed; the message names the extra."""

    exit_code: ClassVar[int] = 5
