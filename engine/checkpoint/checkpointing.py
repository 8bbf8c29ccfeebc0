# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in DeepSpeed's own file layout that are complete or absent.

DeepSpeed writes its files into a folder of a temporary name, each rank adds the state of its
random generators, rank 0 lists all files with their checksums in ``wavemare.json``, and only then
the folder gets its name. Stock DeepSpeed reads it; docs/checkpoints.md says which tools do.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    FOLDING_METADATA_KEY,
    FROZEN_PARAM_FRAGMENTS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from wavemare.engine.checkpoint import resize
from wavemare.engine.checkpoint.compatibility import (
    check_checkpoint_fits,
    check_held,
    check_optimizer,
    check_shapes,
    check_universal,
    check_whole,
    count_alone,
    shapes,
    stock_differs,
    topology,
    untied_weights,
    without_replicas,
    written_with,
)
from wavemare.engine.checkpoint.files import (
    CheckpointFiles,
    RankFiles,
    check_client_state,
    check_optimizer_state,
    check_scheduler,
    read_file,
    refuse_scripts,
    safe_loading,
    taken_literally,
    write_weights,
)
from wavemare.engine.checkpoint.manifest import (
    FORMAT,
    as_tag,
    rank_file,
    read_manifest,
    resolve_tag,
    verify_contents,
)
from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.engine.checkpoint.save import BackgroundSave, Save, background_group, tidy
from wavemare.engine.checkpoint.saved import Saved, check_stock_files
from wavemare.engine.checkpoint.universal import (
    universal_information,
    universal_tag,
    universal_weights,
)
from wavemare.engine.experts import is_divided
from wavemare.engine.launch.group import gather
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.restarts import reached
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.optim.loaded import LoadedWeights
from wavemare.engine.optim.policy import Written
from wavemare.engine.parts import own_part, part_of
from wavemare.engine.seams import destroy_groups, replaced
from wavemare.errors import CheckpointError, ModelError
from wavemare.files import temporary_sibling

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_RESERVED = {
    *("ds_autoep_layers", "autoep_layers", FOLDING_METADATA_KEY),
    *(UNIVERSAL_CHECKPOINT_INFO, CHECKPOINT_PARALLEL_DIMS),
}
_Result = TypeVar("_Result")


class CheckpointMixin(DeepSpeedEngine):
    """Adds whole-or-nothing writing, verification and exact resume to a DeepSpeed engine."""

    checkpoint_engine: Any
    reads_own_replica = True  # of replicas with local steps; else all read the first one's files
    restores_random_state = True
    """Whether a load restores the random generators. A front end that restores them itself says no:
    transformers draws an epoch's order in between."""
    _writing: BackgroundSave | None = None
    _writers: Any = None
    _earlier_runs: tuple[str, ...] = ()
    gather_weights: Callable[[Any, bool], dict[str, Tensor] | None] | None = None
    """Gathers an engine's pipeline or transformers model on rank 0, where each rank holds a part,
    without frozen weights if so asked. `wavemare.initialize` sets it."""
    loaded_weights = LoadedWeights()
    """Lets ``module.load_state_dict`` change what the optimizer steps."""
    loaded_samples = 0
    """The sample that a loaded checkpoint goes on at, until the engine has read its own data."""
    is_collected = False
    """Whether the garbage collector destroys the engine, at a time of its own on each rank."""

    def __del__(self) -> None:
        self.is_collected = True
        super().__del__()

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        if type(self.checkpoint_engine) is TorchCheckpointEngine:
            zipped = self.checkpoint_engine.zipfile_serialization
            self.checkpoint_engine = CheckpointFiles(zipped=zipped)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole model's weights in one file of torch; every rank must call it.

        Returns:
            Whether they were saved. Of ZeRO 3 with a model that is none of transformers' they are
            only with ``stage3_gather_16bit_weights_on_model_save``, as with DeepSpeed.

        Raises:
            ModelError: They cannot be put together here.
            CheckpointError: Rank 0 cannot write the file.
        """
        part = part_of(self)
        if part is not None and not part.is_copy and self.gather_weights is not None:
            state = self.gather_weights(self, exclude_frozen_parameters)
            agree(Path(save_dir), lambda: write_weights(Path(save_dir, save_filename), state))
            return True
        if part is not None and not (part.is_copy or part.is_spread):
            remedy = part.remedy or "Call save_checkpoint"
            raise ModelError("save_16bit_model", save_filename, part.reason, remedy)
        self.synchronize()
        return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))

    @PROGRESS.doing("save_checkpoint")
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save as ``deepspeed.DeepSpeedEngine.save_checkpoint``; every rank must call it.

        The folder ``save_dir/tag`` appears at the end, complete. A failure leaves an older folder
        of that name, and ``latest``, unchanged. With ``wavemare.checkpoint.background`` the save
        completes later: `finish_saving` waits for it.

        Raises:
            ValueError: There is no ``save_dir``.
            NumericsError: A stage has left a step out, as numbers were not finite.
            CheckpointError: A rank could not write this checkpoint, or the one before in the
                background; ``client_state``, the scheduler or the optimizer holds what a load
                would not give back; or ``tag`` is no name of a folder.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        self.drain()
        self.settle()
        self.finish_saving()
        # A background save may end in another folder.
        save_dir = self._of_job(os.path.abspath(save_dir))
        name = tag if tag is not None else f"global_step{self.global_steps}"
        tag = agree(Path(save_dir), lambda: self._check_save(name, client_state))
        self._check_folder(save_dir)
        self._checkpoint_tag_validation(tag)  # of the ranks' own tags, not of a shared name
        state = {**universal_information(self), **client_state}
        if self.checkpoint_engine.is_decoupled():  # writes in the background, renames nothing
            with own_part(), self.without_expert_files():
                return super().save_checkpoint(
                    save_dir, tag, state, save_latest, exclude_frozen_parameters
                )
        folder = Path(save_dir)
        # Its own, whoever else saves there; all ranks write into that of rank 0.
        (partial, *_) = gather(str(temporary_sibling(tag)))
        background = self.settings.checkpoint.background
        if background and self._writers is None:
            self._writers = background_group()
        zipped = getattr(self.checkpoint_engine, "zipped", True)
        files = RankFiles(self.global_rank, background=background, zipped=zipped)
        owner = (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0
        if owner:
            files.attempt(str(folder), lambda: tidy(folder, (folder / tag).parent))
        with own_part(), self._writes_to(files), self.without_expert_files():
            super().save_checkpoint(save_dir, partial, state, False, exclude_frozen_parameters)
        own = {**random_state(), "engine": self.extra_state(), "shapes": shapes(self)}
        own["held"] = adapt(self).held_names()
        names = resize.weight_names(self)
        files.take(own, str(folder / partial / rank_file(self.global_rank)))
        save = Save(
            files=files,
            folder=folder,
            tag=tag,
            partial=folder / partial,
            manifest=_manifest(self, [*self._earlier_runs, self._own_run], names)
            if owner
            else None,
            save_latest=save_latest,
            keep=self.settings.checkpoint.keep,
            node_local=self.use_node_local_storage(),
        )
        if background:
            self._writing = BackgroundSave(save, self._writers)
        else:
            save.complete()
        return True

    def _get_ckpt_name(self, path: str, tag: str, *args: Any, **kwargs: Any) -> str:
        """Return a file of weights as DeepSpeed's method of that name, of this replica."""
        return str(super()._get_ckpt_name(path, self.of_replica(tag), *args, **kwargs))

    def _get_rank_zero_ckpt_name(
        self, checkpoints_path: str, tag: str, *args: Any, **kwargs: Any
    ) -> str:
        """Return a file of the optimizer as DeepSpeed's method of that name, of this replica."""
        name = super()._get_rank_zero_ckpt_name
        return str(name(checkpoints_path, self.of_replica(tag), *args, **kwargs))

    def of_replica(self, tag: str) -> str:
        """Return the folder of this replica's files; those of the first lie where all look."""
        own = self.replica and self.reads_own_replica and not self.is_elastic
        return f"{tag}/replicas/{self.replica}" if own else str(tag)

    def _of_job(self, folder: str) -> str:
        """Return the folder of this replica's checkpoints, if each replica is a job of its own."""
        return os.path.join(folder, f"replica_{self.replica}") if self.is_elastic else folder

    def _check_save(self, tag: object, client_state: Mapping[str, Any]) -> str:
        """Return the tag; refuse what a load would not find or give back."""
        _check_client_state(self, client_state)
        check_scheduler(self.lr_scheduler)
        check_optimizer_state(getattr(self, "basic_optimizer", None))
        return as_tag(tag)

    def _check_folder(self, save_dir: str) -> None:
        """Refuse names by which ranks would write into different folders."""
        others = gather(save_dir)
        if len({*others}) > 1 and not self.use_node_local_storage():
            rank, other = next((r, o) for r, o in enumerate(others) if o != others[0])
            raise CheckpointError(
                "save_dir",
                others[0],
                f"this is its name on rank 0, and on rank {rank} it is {other}",
                "Give all ranks the same one: take a name with the time from rank 0",
            )

    def finish_saving(self) -> None:
        """Wait until a background save is complete; all ranks should call it.

        Raises:
            CheckpointError: A rank could not write it.
        """
        writing, self._writing = self._writing, None
        if writing is not None:  # an engine without a save may be collected in any thread
            with PROGRESS.doing("finish_saving"):
                writing.wait()

    def release_writers(self) -> None:
        """Destroy the process group of background saves; none may be pending."""
        writers, self._writers = self._writers, None
        if writers is not None:
            destroy_groups([writers])

    @PROGRESS.doing("load_checkpoint")
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Load as ``deepspeed.DeepSpeedEngine.load_checkpoint``, after verifying the folder.

        At the topology of the save, training continues bit for bit. Only harmless classes are
        unpickled, so a file cannot run code. Where weights alone are loaded, the optimizer goes on
        from them, whatever it keeps copies of.

        Raises:
            CheckpointError: The folder is missing or damaged; its topology, layout or optimizer is
                another one; a universal checkpoint lacks the optimizer's states; or a file holds
                an object of another class. The same on all ranks, before the engine changes.
        """
        reached("load")
        self.drain()
        self.finish_saving()
        load_dir = self._of_job(os.path.abspath(load_dir))
        universal = self.load_universal_checkpoint()
        whole = load_optimizer_states and not load_module_only
        manifest, resizes = None, False
        if universal:
            check_universal(load_dir, self)
            tag = universal_tag(Path(load_dir), tag)
        else:
            find = partial(_find, Path(load_dir), tag, self, whole=whole)
            tag, manifest, differs = agree(Path(load_dir), find)
            resizes = any(gather(differs))  # a rank alone may find that its stage has other layers
        own, folder = dict[str, Any](), Path(load_dir, str(tag))
        if tag is not None:  # before the weights that it held are compared
            written = agree(folder, partial(_check, folder, manifest, self, whole=whole))
            if written is not None:
                self.replace_optimizer(written)
        if manifest is not None and not resizes:
            strict = load_module_strict and whole
            own = agree(
                folder, partial(_read_own, folder, manifest, self, strict=strict, whole=whole)
            )
        same = whole and manifest is not None and manifest["topology"] == topology(self)
        # Under ZeRO 3 DeepSpeed takes weights from the optimizer's files; with load_module_only it
        # does so only if told to leave the optimizer's states.
        states = load_optimizer_states and (whole or not self.zero_optimization_partition_weights())
        if resizes:
            keeps = load_lr_scheduler_states
            result = self._resized(folder, manifest, whole, load_module_strict, schedule=keeps)
        else:
            with self._reading(load_dir, tag, same=same, universal=universal):
                result = super().load_checkpoint(
                    load_dir,
                    tag,
                    load_module_strict=load_module_strict,
                    load_optimizer_states=states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                    custom_load_fn=custom_load_fn,
                )
        if result[0] is None:  # no checkpoint: nothing changes
            return result
        self.loaded_samples = 0 if load_module_only else self.global_samples
        # A run that takes only weights does not own the other run's checkpoints.
        self._earlier_runs = tuple(manifest.get("runs", ())) if manifest and whole else ()
        if own and whole and same and self.restores_random_state:
            restore_random_state(own)
        self.reset_state()
        if whole:
            count_alone(self.basic_optimizer)
            self.load_extra_state(own.get("engine", {}))
        if result[1]:
            _drop_ours(self, result[1])
            if load_optimizer_states and not states:
                result[1].pop("optimizer", None)  # nor is what DeepSpeed was told to leave
        reached("loaded")
        return result

    def _resized(
        self, folder: Path, manifest: Any, whole: bool, strict: bool, *, schedule: bool
    ) -> tuple[str, dict[str, Any]]:
        """Load what a run of other sizes has saved; see `wavemare.engine.checkpoint.resize`."""
        names = resize.weight_names(self)
        saved = agree(folder, partial(Saved, folder, manifest))
        plan = agree(folder, partial(resize.check, saved, self, names, states=whole, strict=strict))
        if whole:
            resize.check_all_held(plan, self)
        return str(saved.path), resize.load(plan, self, states=whole, schedule=schedule)

    @contextmanager
    def _reading(
        self, load_dir: str, tag: str | None, *, same: bool, universal: bool
    ) -> Iterator[None]:
        """Have DeepSpeed read the files that were written, and harmless classes alone."""
        # A pipeline in bf16 without ZeRO saves its optimizer's states as ZeRO does; DeepSpeed would
        # look elsewhere.
        as_zero = {"zero_optimization": lambda: True} if adapt(self).accumulates_in_fp32 else {}
        with (
            replaced(self, {"reads_own_replica": same, **as_zero}),
            self.without_expert_files(),
            safe_loading(load_dir),
            _weights_of(tag, universal=universal),
            taken_literally(os.path.join(load_dir, tag or "")),
        ):
            yield

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load weights as DeepSpeed's method of that name; the next step goes on from them.

        Parameters are DeepSpeed's: the weights of this rank are ``checkpoint["module"]``. All ranks
        must call it.
        """
        self.drain()
        load = super().load_module_state_dict
        if isinstance(checkpoint.get("module"), Mapping):
            # DeepSpeed's pipeline would look for the key "module" a second time.
            load = partial(DeepSpeedEngine.load_module_state_dict, self)
        frozen = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if frozen is not None and not self.zero_optimization_partition_weights():
            # DeepSpeed takes all that are frozen now from those that were frozen then.
            frozen = {**checkpoint["module"], **frozen}
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: frozen}
        with replaced(self.loaded_weights, {"paused": True}):
            load(
                checkpoint,
                strict,
                custom_load_fn,
                fetch_z3_params,
                z3_params_to_fetch,
                allowed_missing_keys,
            )
        adapt(self).refresh_masters()  # a load of the optimizer's states comes later
        self.reset_state()

    def without_expert_files(self) -> AbstractContextManager[None]:
        """Return the context in which DeepSpeed saves and loads a model as one without experts."""
        return nullcontext()

    @cached_property
    def _own_run(self) -> str:
        return secrets.token_hex(8)

    def _copy_recovery_script(self, save_path: str) -> None:
        """Write DeepSpeed's scripts, or what says that they would give a part of the weights."""
        files: RankFiles | None = getattr(self.checkpoint_engine, "current", None)
        copy, part = super()._copy_recovery_script, part_of(self)
        if part is not None and not part.is_spread:
            copy = partial(refuse_scripts, part.reason)
        elif not (part or self.zero_optimization_partition_gradients()) and any(
            not parameter.requires_grad for parameter in self.module.parameters()
        ):
            copy = partial(refuse_scripts, "frozen weights are in no file that it reads")
        if files is None:
            copy(save_path)
        else:
            files.attempt("zero_to_fp32.py", lambda: copy(save_path))

    @contextmanager
    def _writes_to(self, files: RankFiles) -> Iterator[None]:
        """Take DeepSpeed's files over, unless a checkpoint engine of its own writes them."""
        if not isinstance(self.checkpoint_engine, CheckpointFiles):
            yield
            return
        part, divided = part_of(self), any(map(is_divided, self.module.parameters()))
        # Of other parts DeepSpeed says so itself, and ``ds_to_universal`` needs the shapes.
        wrong = part is not None and not part.is_cut and (self.num_replicas > 1 or divided)
        self.checkpoint_engine.current = files
        self.checkpoint_engine.part = part.reason if part is not None and wrong else None
        try:
            yield
        finally:
            self.checkpoint_engine.current = self.checkpoint_engine.part = None


def _check(folder: Path, manifest: Any, engine: EngineMixin, *, whole: bool) -> Written | None:
    """Check the files of a checkpoint, and that the engine's layers and optimizer can take it.

    Returns:
        What the engine must go on with in place of its own optimizer.

    Raises:
        CheckpointError: A file is damaged, or they cannot.
    """
    if manifest is None and not engine.load_universal_checkpoint():
        if not engine.use_node_local_storage():  # where each host has files of its own
            check_stock_files(folder, whole=whole)
    elif manifest is not None and engine.settings.checkpoint.verify == "checksums":
        _verify(folder, manifest, engine)
    check_whole(folder, engine)
    written = written_with(folder, engine) if whole else None
    if whole and written is None:
        check_optimizer(folder, engine)
    return written


def _weights_of(tag: str | None, *, universal: bool) -> AbstractContextManager[None]:
    """Return the context in which DeepSpeed takes the weights of ZeRO 3 from this tag.

    It does not pass the tag on, and would take those of the latest checkpoint, also in place of a
    universal one.
    """
    module = import_module("deepspeed.runtime.engine")
    name = "get_fp32_state_dict_from_zero_checkpoint"
    read = universal_weights if universal else getattr(module, name)
    return replaced(module, {name: partial(read, tag=tag)})


def _check_client_state(engine: EngineMixin, state: Mapping[str, Any]) -> None:
    """Refuse what a load would not give back; one rank alone would refuse the others, late."""
    taken = sorted(_RESERVED & state.keys()) if engine.has_moe_layers else []
    if taken:
        reason = "DeepSpeed itself uses this name in a checkpoint with experts"
        key = f"client_state[{taken[0]!r}]"
        raise CheckpointError(key, state[taken[0]], reason, "Use another name")
    check_client_state(state)


def _drop_ours(engine: EngineMixin, client_state: dict[str, Any]) -> None:
    """Take out of a client state what the save has put there for ``ds_to_universal``."""
    for key, ours in universal_information(engine).items():
        if client_state.get(key) == ours:
            del client_state[key]


def agree(folder: Path, check: Callable[[], _Result]) -> _Result:
    """Check a folder on every rank; what one refuses, all refuse with its error."""
    refused, result = None, None
    try:
        result = check()
    except CheckpointError as error:
        refused = error
    except Exception as error:  # the others wait for this rank
        reason = f"it cannot be read ({type(error).__name__}: {error})"
        refused = CheckpointError("checkpoint", str(folder), reason, "Resume from another one")
    parts = refused and [refused.key, str(refused.value), refused.reason, refused.remedy]
    found = [other for other in gather(parts) if other is not None]
    if refused is not None or found:
        raise refused or CheckpointError(*found[0])
    return result  # type: ignore[return-value]


def _find(
    load_dir: Path, tag: str | None, engine: EngineMixin, *, whole: bool
) -> tuple[str | None, dict[str, Any] | None, bool]:
    """Return tag and list of files of a checkpoint that this engine can go on from.

    The last is whether its weights and states have to be brought to other sizes.
    """
    tag = resolve_tag(load_dir, tag)
    manifest = read_manifest(load_dir / tag) if tag is not None else None
    if tag is None:
        return None, None, False
    if manifest is not None:
        fits = check_checkpoint_fits(load_dir / tag, manifest, engine, whole=whole)
        return tag, manifest, fits
    return tag, None, stock_differs(load_dir / tag, engine, whole=whole)


def _read_own(
    folder: Path, manifest: Mapping[str, Any], engine: EngineMixin, *, strict: bool, whole: bool
) -> dict[str, Any]:
    """Return this rank's state, if the topology is the same, after a look at the weights.

    Other numbers of replicas take the state of the first one.
    """
    saved, rank = manifest["topology"], engine.global_rank
    if saved != topology(engine):
        if "replicas" not in saved or without_replicas(saved) != without_replicas(topology(engine)):
            return {}
        rank %= saved["data"] * saved["pipe"] * saved["model"]
    own = read_file(folder / rank_file(rank))
    check_shapes(folder, own.get("shapes"), engine, strict=strict)
    check_held(folder, own.get("held"), engine, whole=whole)
    return own


def _verify(folder: Path, manifest: Mapping[str, Any], engine: EngineMixin) -> None:
    """Verify this rank's share of the files' checksums."""
    part, parts = dist.get_rank(), dist.get_world_size()
    if engine.use_node_local_storage():
        sizes = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
        part, parts = engine.local_rank, int(next(filter(None, sizes), "1"))
    verify_contents(folder, manifest, part=part, parts=parts)


def _manifest(engine: EngineMixin, runs: list[str], names: dict[str, str]) -> dict[str, Any]:
    """Return what ``wavemare.json`` says beside the files."""
    plan = engine.layout
    layout = json.loads(plan.to_json()) if plan is not None else None
    return {
        "format": FORMAT,
        "saved": datetime.now(UTC).isoformat(timespec="microseconds"),
        "versions": {name: version(name) for name in ("wavemare", "deepspeed", "torch")},
        "runs": runs,
        "global_steps": engine.global_steps,
        "topology": topology(engine),
        "untied": untied_weights(engine),
        "names": names,
        "plan": None if plan is None else {"digest": plan.digest, "layout": layout},
    }
