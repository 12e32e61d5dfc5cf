"""The flags of `forespeak train`. Parses and calls; the work is in `server.commands.train`, imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from server.flags import takes
from server.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Train drafters from the target's own answers; a run that was stopped goes on.")

ENGINE = ("model", "device", "backend", "weights", "quantise", "threads", "kv_memory", "context", "cache_dir")

Out = Annotated[Path | None, typer.Option("--out", help="the file of weights; what else a run keeps stands beside it")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="answers to learn from, a JSON object a line with prompt_ids and answer_ids; else the target writes"
    ),
]
Answers = Annotated[int, typer.Option("--answers", help="conversations the target writes")]
AnswerTokens = Annotated[int, typer.Option("--answer-tokens", help="longest answer it writes")]
Temperature = Annotated[float, typer.Option("--temperature", help="of every other answer it writes; the rest is greedy")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="train so long  [default: 60 without another budget]")]
Tokens = Annotated[int | None, typer.Option("--tokens", help="train on so many answer tokens")]
Steps = Annotated[int | None, typer.Option("--steps", help="train so many steps")]
Vocabulary = Annotated[int, typer.Option("--vocabulary", help="tokens it can say, 0 = as many as --coverage needs")]
Coverage = Annotated[float, typer.Option("--coverage", help="share of the answers' tokens among them")]
BatchTokens = Annotated[int, typer.Option("--batch-tokens", help="padded tokens of a step")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="at its highest")]
Precision = Annotated[str, typer.Option("--precision", help="auto, float32 or bfloat16")]
Seed = Annotated[int, typer.Option("--seed", help="of weights, data order and answers")]
HeldOut = Annotated[float, typer.Option("--held-out", help="share of conversations kept for judging")]
CheckpointSteps = Annotated[int, typer.Option("--checkpoint-steps", help="steps between checkpoints")]
EvaluateSteps = Annotated[int, typer.Option("--evaluate-steps", help="steps between judgements")]
Restart = Annotated[bool, typer.Option("--restart", help="forget the checkpoint beside --out")]


@app.command()
@takes(*ENGINE, config=False)
def heads(
    settings: Settings,
    out: Out = None,
    kind: Annotated[str, typer.Option("--kind", help="attention or recurrent")] = "attention",
    data: Data = None,
    answers: Answers = 3000,
    answer_tokens: AnswerTokens = 200,
    temperature: Temperature = 0.8,
    minutes: Minutes = None,
    tokens: Tokens = None,
    steps: Steps = None,
    depths: Annotated[int, typer.Option("--depths", help="tokens guessed in a row while training")] = 4,
    anchors: Annotated[float, typer.Option("--anchors", help="share of positions guessed from further than one token")] = 0.5,
    width: Annotated[int, typer.Option("--width", help="inner width of its MLP, 0 = by the target's")] = 0,
    vocabulary: Vocabulary = 0,
    coverage: Coverage = 0.975,
    batch_tokens: BatchTokens = 4096,
    learning_rate: LearningRate = 1e-3,
    precision: Precision = "auto",
    seed: Seed = 0,
    held_out: HeldOut = 0.04,
    checkpoint_steps: CheckpointSteps = 50,
    evaluate_steps: EvaluateSteps = 200,
    restart: Restart = False,
) -> None:
    """Train heads on the target's hidden states."""
    _run(settings, "heads", dict(locals()))


@app.command()
@takes(*ENGINE, config=False)
def student(
    settings: Settings,
    out: Out = None,
    data: Data = None,
    answers: Answers = 3000,
    answer_tokens: AnswerTokens = 200,
    temperature: Temperature = 0.8,
    minutes: Minutes = None,
    tokens: Tokens = None,
    steps: Steps = None,
    layers: Annotated[int, typer.Option("--layers", help="layers it takes from the target, evenly spread")] = 2,
    share_output: Annotated[
        bool, typer.Option("--share-output", help="score with the target's own vocabulary rows, untrained: a smaller file")
    ] = False,
    hidden_loss: Annotated[float, typer.Option("--hidden-loss", help="weight of the distance to the target's states")] = 0.0,
    vocabulary: Vocabulary = 0,
    coverage: Coverage = 0.975,
    batch_tokens: BatchTokens = 4096,
    learning_rate: LearningRate = 1e-3,
    precision: Precision = "auto",
    seed: Seed = 0,
    held_out: HeldOut = 0.04,
    checkpoint_steps: CheckpointSteps = 50,
    evaluate_steps: EvaluateSteps = 200,
    restart: Restart = False,
) -> None:
    """Train a student: a small model made of some of the target's own layers."""
    _run(settings, "student", dict(locals()))


@app.command()
def plot(
    log: Annotated[Path, typer.Argument(help="a training log, NAME.log.jsonl")],
    out: Annotated[Path | None, typer.Option("--out", help="the SVG file  [default: NAME.svg beside the log]")] = None,
) -> None:
    """Draw the curves of a training log."""
    from server.commands import train as command

    raise typer.Exit(command.plot(log, out))


@app.command()
def card(
    log: Annotated[Path, typer.Argument(help="a training log, NAME.log.jsonl")],
    bench: Annotated[list[Path] | None, typer.Option("--bench", help="output of forespeak bench; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="the Markdown file  [default: NAME.md beside the log]")] = None,
) -> None:
    """Write the card of trained weights from their log, with what forespeak bench measured."""
    from server.commands import train as command

    raise typer.Exit(command.card(log, bench or [], out))


def _run(settings: Settings, what: str, flags: dict[str, Any]) -> None:
    from server.commands import train as command

    del flags["settings"]
    restart = flags.pop("restart")
    out = flags.pop("out") or Path(f"{Path(settings.model).name}.{what}.safetensors")
    data = flags.pop("data")
    flags |= {"what": what, "out": str(out), "data": None if data is None else str(data)}
    raise typer.Exit(command.run(settings, flags, restart))
