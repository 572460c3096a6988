"""A job that begins where a checkpoint of another job was: ``checkpoint.resume_from``.

The folder may be a job's, its ``checkpoints`` or one checkpoint. Promises: what can't be taken up
is refused at submit, with what it is, before a node is taken; nothing that a folder holds is ever
unpickled; the skip ledger and the precision that the state was trained with come along, as an
action of the job that is stored before its first step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.checkpoint_files import DamagedFileError, RankFileReader, entries, is_absent
from launch.checkpoint_manifest import Checkpoint, ManifestError, read_manifest
from launch.checkpoints import verify_checkpoint
from launch.commands import RestorePoint
from launch.state_header import LAYOUT, parse_header
from orchestrator.actions import Action, Asked, History
from orchestrator.recovery.drafts import drafted
from orchestrator.saved.checkpoint_facts import differences
from orchestrator.spec.errors import Problem, SpecError, dotted
from orchestrator.spec.job import JobSpec
from parallel.config import ExchangeDtype
from parallel.layout import RankLayout

KEY = "checkpoint.resume_from"
FOREIGN_ATTEMPT = 0
"""Of a point that no attempt of this job has made."""

_NAME_ANOTHER = "name another one"
_SAFE = (
    "convert it in a process that you trust with it: `python zero_to_fp32.py FOLDER OUT "
    "--safe_serialization` (DeepSpeed writes that script beside its checkpoints) makes safetensors "
    "of the weights, which the layers of a model.factory can load as they are built"
)
_PICKLED = (
    "which runs code when it is loaded: load it with torch.load(…, weights_only=True) in a process "
    "that you trust with it, write the weights with safetensors.torch.save_file, and let the "
    "layers of a model.factory load those as they are built"
)


def check_resume_from(spec: JobSpec, file: str) -> None:
    """Raise ``SpecError`` if the completed ``spec`` can't begin where it says."""
    path = spec.checkpoint.resume_from
    if path is None:
        return
    unread: list[str] = []
    whole = (c for c in checkpoints_in(path) if _is_whole(c))
    best = next((c for c in whole if _is_read(c, unread)), None)
    if best is None:
        message, remedy = (unread[0], _NAME_ANOTHER) if unread else _what_is_there(path)
        raise SpecError([Problem(file, KEY, str(path), message, remedy)])
    found = list(differences(spec, best.run))
    if spec.training.steps <= best.step:
        told = f"it is of step {best.step}, and training.steps is {spec.training.steps}"
        raise SpecError([Problem(file, KEY, str(path), told, "train for more steps")])
    if found:
        raise SpecError([Problem(file, dotted(f.path), "", f.message, f.remedy) for f in found])


LeftOut = Callable[[Path, str], None]
"""Is told of a folder that should be a checkpoint and isn't, and why."""
Unseen = Callable[[Path, OSError], None]
"""Is told of one of which the storage doesn't say what it is."""


def _nobody(folder: Path, why: str) -> None:
    """Whoever asks needs the good ones alone."""


def checkpoints_in(
    path: Path, left_out: LeftOut = _nobody, unseen: Unseen | None = None
) -> list[Checkpoint]:
    """Of a job's folder, its ``checkpoints`` or one of those; newest first, contents unchecked.
    Without ``unseen`` all that is none is ``left_out``."""
    unseen = unseen or left_out_too(left_out)
    folders, unlisted = [path], []
    for folder in (path, path / "checkpoints"):
        try:
            folders += reversed(entries(folder, "step-"))
        except OSError as error:
            unlisted.append((folder, error))
    found: list[Checkpoint] = []
    for folder in folders:
        try:
            found.append(read_manifest(folder))
        except (OSError, ManifestError) as error:
            named = folder.name.startswith("step-")
            if isinstance(error, OSError) and not is_absent(error) and (named or folder == path):
                unseen(folder, error)
            elif named:
                left_out(folder, str(error))
    # A checkpoint itself need not be listed, nor have others below it.
    for folder, why in unlisted if path not in (c.path for c in found) else ():
        unseen(folder, why)
    return found


def left_out_too(left_out: LeftOut) -> Unseen:
    """For whom what can't be looked at is as good as not there."""
    return lambda folder, error: left_out(folder, f"it can't be looked at: {error.strerror}")


def foreign_points(
    spec: JobSpec, left_out: LeftOut = _nobody, unseen: Unseen | None = None
) -> list[RestorePoint]:
    """Where the job may begin by its spec, best first; the others as of ``checkpoints_in``."""
    path = spec.checkpoint.resume_from
    unseen = unseen or left_out_too(left_out)
    found = []
    for c in [] if path is None else checkpoints_in(path, left_out, unseen):
        try:
            problems = verify_checkpoint(c, contents=False)
        except OSError as error:
            unseen(c.path, error)
            continue
        if problems:
            left_out(c.path, "; ".join(problems))
        elif set(c.files) != set(range(len(c.files))):
            left_out(c.path, "its manifest lacks ranks")
        else:
            found.append(RestorePoint(c.step, "disk", FOREIGN_ATTEMPT, 0, str(c.path)))
    return found


@dataclass(frozen=True, slots=True)
class ControlState:
    """What a saved state was trained with, beside its tensors."""

    step: int
    ledger: tuple[int, ...]
    in_bf16: tuple[str, ...]
    """Layers of an FP8 job that were moved there and hadn't been ordered back."""
    lr_scale: float
    exchange: ExchangeDtype


UNREADABLE = (OSError, DamagedFileError, ManifestError, ValueError, KeyError)
"""What reading a checkpoint's headers raises where they are damaged."""


def control_state(folder: Path | str) -> ControlState:
    """Of a checkpoint. Raises OSError, DamagedFileError, ManifestError or ValueError."""
    metas = _metas(Path(folder))
    ordered: dict[str, str] = {}
    for meta in metas:
        precision = meta["engine"]["precision"]
        waiting = dict.fromkeys(precision.get("returning", ()), "fp8")
        ordered |= precision["precision"] | waiting
    return ControlState(
        metas[0]["step"],
        tuple(metas[0]["ledger"]),
        tuple(sorted(name for name, now in ordered.items() if now == "bf16")),
        metas[0]["lr_scale"],
        metas[0]["engine"]["exchange_dtype"],
    )


def _is_whole(checkpoint: Checkpoint) -> bool:
    """Whether its files can be seen to be there, of their sizes."""
    try:
        return not verify_checkpoint(checkpoint, contents=False)
    except OSError:
        return False


def _is_read(checkpoint: Checkpoint, why_not: list[str]) -> bool:
    """Whether its files say what they were trained with; else ``why_not`` is told. Their tensors
    are read by the ranks, and compared with the digests then."""
    try:
        control_state(checkpoint.path)
    except UNREADABLE as error:
        why_not.append(f"{checkpoint.path.name} can't be read: {error}")
        return False
    return True


def resumed(state: ControlState, folder: str, history: History, spec: JobSpec) -> Action:
    """A job takes over what a foreign state was trained with. Pure."""
    told = [f"{len(state.ledger)} batches left out"] if state.ledger else []
    told += [f"{', '.join(state.in_bf16)} in BF16"] if state.in_bf16 else []
    detail = f", with {' and '.join(told)}" if told else ""
    reason = f"Training begins with the state of step {state.step} in {folder}{detail}."
    return replace(
        drafted("resumed", (), history, reason),
        step=max(history.step, 0),
        skip_batches=state.ledger,
        precision=dict.fromkeys(state.in_bf16, "bf16"),
        lr_scale=state.lr_scale,
        exchange=state.exchange if spec.communication_data_type == "auto" else None,
        asked=Asked(KEY, KEY),
    )


def _metas(folder: Path) -> list[Mapping[str, Any]]:
    """Of one rank of each pipeline stage."""
    checkpoint = read_manifest(folder)
    first = _meta(checkpoint, 0)
    layout = RankLayout.from_json(first[LAYOUT])
    others = [_meta(checkpoint, layout.rank_at(p, 0, 0)) for p in range(1, layout.degrees[0])]
    return [first, *others]


def _meta(checkpoint: Checkpoint, rank: int) -> Mapping[str, Any]:
    reader = RankFileReader(checkpoint.path, checkpoint.files[rank])
    try:
        size = int.from_bytes(reader.read(0, 8).tobytes(), "little")
        return parse_header(reader.read(8, 8 + size).tobytes())[0]
    except KeyError as error:
        raise ValueError(f"rank {rank}'s file doesn't say {error}") from error
    finally:
        reader.close()


def _what_is_there(path: Path) -> tuple[str, str]:
    """Message and remedy for a place without a usable checkpoint of Octavo."""
    try:
        there = path.exists()
    except OSError:
        # A name that is too long is none.
        there = False
    if not there:
        return "does not exist", "name a job's folder, or one of its checkpoints"
    names, inside = [path.name], list[str]()
    try:
        if path.is_dir():
            names = sorted(p.name for p in path.iterdir())
            inside = [q.name for p in path.iterdir() if p.is_dir() for q in p.iterdir()][:10_000]
    except OSError as error:
        return f"can't be read: {error.strerror}", "name a folder that the controller may read"
    for known, message, remedy in _KINDS:
        seen = next((n for n in [*names, *inside] if known(n)), None)
        if seen is not None:
            return message.format(seen), remedy
    committed = [n for n in [*names, *inside] if re.fullmatch(r"step-\d+", n)]
    if committed or (path / "manifest.json").exists():
        damaged = committed or [path.name]
        return (
            f"holds no checkpoint that can be used: of {', '.join(damaged[:3])} the manifest is "
            "missing, garbage or of another release, or files are missing or cut off",
            _NAME_ANOTHER,
        )
    shown = ", ".join(names[:5]) or "nothing"
    return f"holds no checkpoint of Octavo, but {shown}", "name a job's folder, or a checkpoint"


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda name: re.search(pattern, name) is not None


_KINDS: Sequence[tuple[Callable[[str], bool], str, str]] = (
    (
        _matches(r"(model_states|optim_states)\.pt$|^zero_to_fp32\.py$"),
        "holds a DeepSpeed checkpoint ({}), whose files are pickles and run code when loaded",
        _SAFE,
    ),
    (
        _matches(r"\.distcp$|^\.metadata$"),
        "holds a checkpoint of torch.distributed ({}), whose metadata is a pickle",
        f"make one file of it with torch.distributed.checkpoint.format_utils; that is a pickle, "
        f"{_PICKLED}",
    ),
    (
        _matches(r"^latest_checkpointed_iteration\.txt$"),
        "holds a Megatron checkpoint ({}), whose files are pickles",
        f"it is of pickles, each of {_PICKLED}",
    ),
    (
        _matches(r"\.(pt|pth|bin|ckpt|pkl)$"),
        "holds {}, a pickle of torch",
        f"that is a file {_PICKLED}",
    ),
    (
        _matches(r"^(?!rank-\d).*\.safetensors$"),
        "holds weights alone ({}), without the state of an optimizer and without a manifest",
        "let the layers of a model.factory load them as they are built, and start at step 0",
    ),
)
