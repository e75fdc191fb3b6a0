"""Files through the node's service."""

from __future__ import annotations

import logging
import os

from .. import files as _files
from ..errors import DeadlineError, Error, UnavailableError

logger = logging.getLogger(__name__)


class Holder:
    """The node's service, if a load is to go through one. Without it, and without room there, drives are read."""

    def __init__(self, service: str | os.PathLike[str] | bool | None, keep: bool) -> None:
        self._keep = keep
        self._service: _files.Service | None = None
        if service:
            try:
                self._service = _files.Service(None if service is True else service)
            except Error as error:
                logger.warning("kvhoist: files are read from their drives, by each process: %s", error)

    def hold(self, file: _files.File) -> _files.File:
        if self._service is None:
            return file
        try:
            return self._service.hold(file, keep=self._keep)
        except (DeadlineError, UnavailableError) as error:
            # It is gone, or would keep each further file waiting as long.
            self._service = None
            logger.warning("kvhoist: %s and the files after it are read from their drives: %s", file.path, error)
        except Error as error:
            logger.warning("kvhoist: %s is read from its drive: %s", file.path, error)
        return file
