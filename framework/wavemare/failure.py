# SPDX-License-Identifier: Apache-2.0
"""How a failing rank reports its error: one message, from one rank, and no hang.

A launcher starts N processes, and one mistake makes all of them fail. Their N messages, or the
"connection closed by peer" of ranks that lost a peer, would hide the cause. So

* before the process group exists all ranks fail alike: rank 0 prints, and the others print only if
  nobody has ended them after a moment (they failed alone);
* afterwards the first rank that claims the failure in the group's store prints;
* a rank that lost a peer waits for a moment, in which the launcher ends it. If it does not, and
  rank 0, which hosts the store, is gone, the rank prints one line.

Recipes use `run_main`; other scripts get the same by `watch_failures`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from wavemare.comm.waits import Call, failing, told_to_end
from wavemare.engine.launch.group import (
    end_mpich_helper,
    environment_rank,
    exit_now,
    peer_loss,
)
from wavemare.errors import CommError, WavemareError
from wavemare.extras import missing_compiler

_STORE_KEY = "wavemare/failure"
_STORE_SECONDS = 2.0
# Launchers check for dead processes about once a second, and then end the others.
_GRACE_SECONDS = 3.0
# For peers that fail too and ask the store, which may live in this process.
_LINGER_SECONDS = 0.5
_POLL_SECONDS = 0.02
# More than the watchdog needs to end this process.
_ENDING_SECONDS = 30.0
# For writers; a rank that has stopped would hold them up for ever.
_SAVE_SECONDS = 600.0
# For loggers that send the rest of a run; a handler that waits for peers would never end.
_HANDLERS_SECONDS = 20.0
_INTERRUPTED = 130
_TORCH_HOOK = "torch.distributed.distributed_c10d"


def run_main(main: Callable[[], object], *, grace_s: float = _GRACE_SECONDS) -> None:
    """Run a program's main function and turn its failures into messages and exit codes.

    A `WavemareError` is printed without a traceback and ends the process with its ``exit_code``;
    Ctrl-C ends it in silence with 130; any other exception keeps its traceback and ends it with 1.

    Args:
        main: Called without arguments; `SystemExit` passes through.
        grace_s: Seconds in which a launcher may end a rank that reports nothing.
    """
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        _end(error, grace_s)
    # The interpreter's shutdown would look for cycles in all that was imported: a second.
    atexit.register(gc.freeze)


def watch_failures() -> None:
    """Have exceptions that nobody catches end this process as `run_main` does.

    Without it, a script that fails while MPI is alive would wait for the other ranks. A
    ``sys.excepthook`` that the script has set itself stays.
    """
    hook = sys.excepthook
    # torch's hook only adds the rank to each line.
    if hook is sys.__excepthook__ or hook.__module__ == _TORCH_HOOK:
        sys.excepthook = _hook


def _hook(
    kind: type[BaseException], error: BaseException, location: TracebackType | None, /
) -> None:
    # torch's hook, which may have called this one, replaces stderr to collect the output.
    sys.stderr = sys.__stderr__
    _end(error, _GRACE_SECONDS)


def _end(error: BaseException, grace_s: float) -> NoReturn:
    """Report a failure, unless another rank does, and end the process."""
    if isinstance(error, KeyboardInterrupt):
        _leave(_INTERRUPTED)
    if (watchdog := _watchdog()) is not None and watchdog.ending:
        # The watchdog ends this process; the error is a consequence.
        threading.Event().wait(_ENDING_SECONDS)
    error = missing_compiler(error) or error
    if isinstance(error, WavemareError):
        if isinstance(error, CommError) and error.__cause__ and peer_loss(error.__cause__):
            time.sleep(grace_s)  # in which that peer claims its failure
        if _should_print(_count_failures(1), grace_s):
            where = f" on rank {environment_rank()}" if _group_exists() else ""
            notes = getattr(error, "__notes__", [])  # where in the plan, for example
            sys.stderr.write("\n".join([*notes, f"error{where}: {error}\n"]))
        _report_to_torchrun(error)
        if not isinstance(error, CommError):  # the error of a lost peer, without whom no save ends
            _finish_saves()
        _leave(error.exit_code)
    # A lost peer is not claimed: the peer may be about to report its error.
    if (loss := peer_loss(error)) is None:
        _count_failures(1)
    elif (summary := _explain_lost_peers()) is not None:
        sys.stderr.write(f"{summary}\n")
        # In which a launcher sees the exit code of the rank that is lost.
        _await_the_end(grace_s)
        _report_to_torchrun(error)
        _leave(1)
    else:
        _await_the_end(grace_s)  # in which others claim the failure
        reported = _count_failures(0)
        if reported is None and _group_exists() and environment_rank() != 0:
            # Rank 0, which hosts the store, may have reported its error: no traceback after that.
            sys.stderr.write(
                f"rank {environment_rank()} ends because rank 0 has ended or cannot be reached "
                f"({loss}): see the error of rank 0 above, if there is one\n"
            )
            _leave(1)
        if reported:
            _leave(1)
    lines = traceback.format_exception(error)
    if _group_exists():
        lines.insert(0, f"rank {environment_rank()} failed:\n")
    # One call, so that the lines of several ranks do not mix.
    sys.stderr.write("".join(lines))
    _report_to_torchrun(error)
    _leave(1)


def _await_the_end(grace_s: float) -> None:
    """Wait for a moment, until the launcher ends this process because another one has failed.

    That one has claimed its failure before it has ended.
    """
    until = time.monotonic() + grace_s
    # The handler that sets the event runs in this thread, and would wait for the event's lock.
    while not told_to_end.is_set() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _finish_saves() -> None:
    """Complete the checkpoints that threads write: an error's message may point to the last."""
    for thread in threading.enumerate():
        if thread.name == "wavemare-checkpoint":
            thread.join(_SAVE_SECONDS)


def _explain_lost_peers() -> str | None:
    """Return what the watchdog knows of lost ranks; None if another rank reports it."""
    watchdog = _watchdog()
    if watchdog is None or (claims := _count_failures(0)):
        return None
    summary: str | None = watchdog.explain_loss()
    # Of several ranks that lost the same peer, the first one prints.
    is_first = claims is None or _count_failures(1) in (None, 1)
    return summary if is_first else None


def _watchdog() -> Any:
    watcher = sys.modules.get("wavemare.engine.health.watchdog")
    return watcher.current() if watcher is not None else None


def _should_print(claims: int | None, grace_s: float) -> bool:
    """Whether this rank prints a message that other ranks may print as well."""
    if claims is None and (environment_rank() != 0 or _group_exists()):
        # Rank 0 fails alike, or the store is gone with the rank that failed first.
        time.sleep(grace_s)
    return claims in (None, 1)


def _count_failures(new: int) -> int | None:
    """Return how many failures ranks have claimed, with new ones of this rank.

    The store of the default process group counts them. None if there is none, or no answer.
    """
    if not _group_exists():
        return None
    from torch.distributed import distributed_c10d

    # The store's own timeout is the group's, often half an hour.
    count = Call(lambda: int(distributed_c10d._get_default_store().add(_STORE_KEY, new)))
    return count.wait(_STORE_SECONDS)


def _group_exists() -> bool:
    # Looked up, not imported: the command line fails fast, before torch is loaded.
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _report_to_torchrun(error: BaseException) -> None:
    """Write the error to the file that ``torchrun`` reads for its report, which comes last."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None and isinstance(error, WavemareError):
        content = {"message": f"error: {error}", "timestamp": int(time.time())}
        with suppress(OSError):  # the error has been printed
            Path(file).write_text(json.dumps(content), encoding="ascii")
    elif file is not None:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # torch records the exception being handled
        except BaseException:
            get_error_handler().record_exception(error)


def _leave(code: int) -> NoReturn:
    """End the process, without the interpreter's shutdown where that could hang."""
    if not _group_exists() and "mpi4py.MPI" not in sys.modules:
        end_mpich_helper()
        raise SystemExit(code)
    if (watchdog := _watchdog()) is not None:
        watchdog.stop(code)
    time.sleep(_LINGER_SECONDS)
    _run_exit_handlers(code)
    exit_now(code)


def _run_exit_handlers(code: int) -> None:
    """Call what scripts and libraries have registered by ``atexit``; it may not take for ever."""
    failing.set()
    limit = threading.Timer(_HANDLERS_SECONDS, exit_now, (code,))
    limit.daemon = True
    limit.start()
    atexit._run_exitfuncs()
