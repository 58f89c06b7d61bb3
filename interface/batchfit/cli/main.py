"""The console entry: commands, exit statuses, errors in one line."""

from __future__ import annotations

import os
import sys
import traceback
from importlib import metadata
from typing import Any

import click

from .calibrate_options import calibrate_options, validate_options
from .options import estimate_options, explain_options, gpus_options, snapshot_options

#: Exit statuses. "Does it fit" is answered by the first two.
YES, NO, ERROR, INTERRUPTED = 0, 1, 2, 130

#: With this variable set, an error also prints its traceback.
TRACEBACK = "BATCHFIT_TRACEBACK"

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 88}


def version() -> str:
    """The installed version of batchfit.

    >>> version()[0].isdigit()
    True
    """
    try:
        return metadata.version("batchfit")
    except metadata.PackageNotFoundError:
        return "0+source"


@click.group(context_settings=_CONTEXT, invoke_without_command=True)
@click.version_option(version(), prog_name="batchfit", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> int:
    """How much GPU memory a PyTorch training step needs, and the largest batch that fits.

    Only "calibrate" needs the device that it is about.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
    return ERROR


@cli.command("estimate", short_help="Predict a training step's memory and the largest batch.")
@click.argument("target")
@estimate_options
@click.pass_context
def estimate_command(context: click.Context, /, target: str, **options: Any) -> int:
    """Predict the GPU memory of TARGET's training step and the largest batch that fits.

    \b
    TARGET is one of
      torchvision:NAME     a torchvision model, as torchvision:resnet50
      timm:NAME            a timm model, as timm:convnext_tiny
      hf:ID_OR_DIR         a Hugging Face configuration, as hf:gpt2 or hf:./my-model
      FILE.py:NAME         a Workload, a function that makes one or a model, or a module
      package.module:NAME  the same, in an importable module

    Neither weights nor remote code are ever loaded. With --batch and --gpu (or --budget) the exit
    status says whether all those batches fit: 0 yes, 1 no, 2 an error.
    """
    from .command import estimate_target

    output, fits = estimate_target(target, _given(context, options))
    click.echo(output)
    return YES if fits else NO


@cli.command("snapshot", short_help="Write a predicted memory snapshot, or compare a real one.")
@click.argument("target")
@snapshot_options
@click.pass_context
def snapshot_command(context: click.Context, /, target: str, **options: Any) -> int:
    """Write the memory snapshot that TARGET's training would leave, or compare a real one with it.

    The file opens in PyTorch's own viewer: drop it onto pytorch.org/memory_viz, or make a page of
    it with "python -m torch.cuda._memory_viz trace_plot FILE -o FILE.html".

    With --compare, a real snapshot is laid beside the prediction: totals, categories, and the
    largest blocks that only one of the two has. Nothing in the file is run.

    TARGET is as in "batchfit estimate".
    """
    given = _given(context, options)
    if ("output" in given) is ("compare" in given):
        raise click.UsageError("give either --output or --compare", context)
    for flag, needed in (("force", "output"), ("as_json", "compare")):
        if flag in given and needed not in given:
            name = flag.removeprefix("as_")
            raise click.UsageError(f"--{name} goes with --{needed} only", context)
    from .command import compare_target, snapshot_target

    click.echo((compare_target if "compare" in given else snapshot_target)(target, given))
    return YES


@cli.command("calibrate", short_help="Probe a training step on the device here, and answer.")
@click.argument("target")
@calibrate_options
@click.pass_context
def calibrate_command(context: click.Context, /, target: str, **options: Any) -> int:
    """Measure TARGET's training step on the device here and find the largest batch that fits.

    Two or three short probes correct the prediction; the answer is then run once. TARGET is as in
    "batchfit estimate". The exit status is 0 if any batch fits, 1 if none does, 2 for an error.
    """
    given = _given(context, options)
    if "epoch_seconds" in given and "dataset" not in given:
        raise click.UsageError("--epoch-seconds goes with --dataset only", context)
    if "tuned_for" in given and "target_batch" not in given:
        raise click.UsageError("--tuned-for goes with --target-batch only", context)
    # Read when torch is loaded: its profiler, which measures on the CPU, talks on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from .calibrate import calibrate_target

    output, fits = calibrate_target(target, given)
    click.echo(output)
    return YES if fits else NO


@cli.command("validate", short_help="Compare a saved calibration with a measured peak.")
@click.argument("file")
@validate_options
@click.pass_context
def validate_command(context: click.Context, /, file: str, **options: Any) -> int:
    """Compare the calibration in FILE with a peak that was measured later, or a trainer's log.

    FILE is what "batchfit calibrate --saved FILE" or Calibration.save wrote. The exit status is 0
    if the measurement lies within the predicted interval, 1 if not, 2 for an error.
    """
    given = _given(context, options)
    if ("measured" in given) is ("log" in given):
        raise click.UsageError("give either --measured or --log", context)
    if "log" in given and "reserved" in given:
        raise click.UsageError("--reserved goes with --measured only: a log says it", context)
    from .validate import validate_file

    output, within = validate_file(file, given)
    click.echo(output)
    return YES if within else NO


@cli.command("explain", short_help="Line up what PyTorch, nvidia-smi and torchinfo say.")
@click.argument("target")
@explain_options
@click.pass_context
def explain_command(context: click.Context, /, target: str, **options: Any) -> int:
    """Say why PyTorch, nvidia-smi and torchinfo name different numbers for TARGET's memory.

    From the bytes that tensors ask for, over what is allocated and reserved, to what the process
    takes of the GPU. TARGET is as in "batchfit estimate".
    """
    from .command import explain_target

    click.echo(explain_target(target, _given(context, options)))
    return YES


def _given(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave."""
    return {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }


@cli.command("gpus", short_help="List the GPUs that batchfit knows.")
@click.argument("words", nargs=-1, metavar="[FILTER]...")
@gpus_options
def gpus_command(words: tuple[str, ...], as_json: bool) -> int:
    """List the GPUs that batchfit knows: memory as PyTorch sees it, and what a job may use.

    FILTER keeps those whose name, vendor, architecture or category holds every word of it, as in
    "batchfit gpus a100" or "batchfit gpus consumer".
    """
    from .catalogue import gpus_json, gpus_table

    click.echo(gpus_json(words) if as_json else gpus_table(words))
    return YES


def main(args: list[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        args: the arguments after the program's name; None takes ``sys.argv``.
    """
    try:
        status = cli.main(args, prog_name="batchfit", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except click.ClickException as error:
        _say(_usage(error))
        return ERROR
    except BrokenPipeError:  # the reader of our output has gone, as in `batchfit gpus | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except Exception as error:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        _say(_message(error))
        return ERROR


def _say(message: str) -> None:
    """One line on stderr."""
    click.echo(f"batchfit: {' '.join(message.split())}", err=True)


def _usage(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    if context is None:
        return message
    end = "" if message.endswith(("?", ")")) else ";"
    return f"{message}{end} see `{context.command_path} --help`"


def _message(error: Exception) -> str:
    """One line for an error: ours as it is, anything else named as what it is."""
    errors = sys.modules.get("batchfit.estimator.errors")
    if errors is not None and isinstance(error, errors.BatchfitError):
        from .files import user_line

        place = user_line(error)
        return f"{error}{f' ({place})' if place and place not in str(error) else ''}"
    if isinstance(error, MemoryError):
        return (
            "not enough memory on this host; give a function that builds the model instead of a "
            "model that exists: it is then built without data"
        )
    return (
        f"unexpected {type(error).__name__}: {error}; this is likely a fault of batchfit, "
        f"{TRACEBACK}=1 shows where"
    )
