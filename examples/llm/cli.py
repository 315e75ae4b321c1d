"""The command line: ``generate`` and ``finetune``.

The last module, which ties the others together. Invalid input becomes a message and exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import blufunc as bf
from blufunc import io, random, tree
from blufunc.errors import ArgumentError, DataError, ShardingError, UnsupportedError
from examples.gpt import data, devices, mesh_options, report, sharded
from examples.llm import (
    architectures,
    finetune,
    generate,
    layouts,
    model,
    peft,
    placement,
    quantized,
    speculative,
    tokenizer,
    weights,
)
from examples.llm.config import TINY, Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 2 for invalid input."""
    options = _parser().parse_args(arguments)
    if bf.distributed.is_launched():
        bf.distributed.initialize()
    try:
        if options.device != "cpu":
            bf.config.update("default_device", options.device)
        return {"generate": _generate, "finetune": _finetune}[options.command](options)
    except (DataError, UnsupportedError, ArgumentError, ShardingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


# -- the model -------------------------------------------------------------------------------------


def _config(folder: str | None, options: argparse.Namespace) -> Config:
    """Configuration of a folder; without one, of the small random model."""
    sizes = {
        name: getattr(options, name) for name in ("layers", "experts") if getattr(options, name) is not None
    }
    if folder is not None:
        if sizes:
            raise DataError(
                f"--{next(iter(sizes))} with a model",
                where=f"--model {folder}",
                why="it is a size of the random model; a folder has its own, in config.json",
                fix="leave one of the two options out",
            )
        return architectures.read(folder)
    if sizes.get("experts"):
        sizes |= {"architecture": "mixtral", "balance": 0.01, "tied": False}
    return dataclasses.replace(TINY, **sizes)


def _loaded(
    folder: str | None,
    options: argparse.Namespace,
    dtype: str | None,
    layout: placement.Layout,
    quantize: str | None = None,
) -> dict:
    """The parameters by their layout, or quantized; without a folder, random ones."""
    config, plan = layout.config, layout.plan
    if quantize is not None:
        if plan.mesh is not None:
            raise DataError(
                "quantized weights are on one device",
                where=f"--mesh {sharded.spelled(dict(plan.mesh.shape))}",
                why="their codes and scales are packed as a whole, and are not divided",
                fix="leave one of the two options out",
            )
        quantized.check(config, quantize)
    began = time.perf_counter()
    if folder is None:
        one = dataclasses.replace(config, groups=1)  # the same model on any mesh
        init = lambda key: placement.in_groups(model.init(key, one, dtype or "float32"), config)
        params = bf.jit(init)(random.key(options.seed))
        params = layout.placed(params)
        params = params if quantize is None else quantized.quantized(params, quantize)
    else:
        params, _ = weights.load(
            folder, layout.places(), dtype, config, quantize, placement.order(config.layers, plan)
        )
    leaves, nbytes = tree.leaves(quantized.types(params)), sum(x.nbytes for x in tree.leaves(params))
    size, kind = sum(x.size for x in leaves), str(leaves[0].dtype) + (f" and {quantize}" if quantize else "")
    name = "a random model of bytes" if folder is None else folder
    _say(
        f"model   {name}: {config.architecture}, {size:,} parameters, {nbytes / 1e6:,.1f} MB of {kind}, "
        f"in {time.perf_counter() - began:.1f} s"
    )
    return params


def _for_generation(config: Config, asked: dict[str, int] | None) -> placement.Layout:
    """The layout of a model that generates: one device, or "fsdp" and "model"."""
    if not asked:
        return placement.Layout(config=config)
    axes = devices.sizes(asked)
    if others := sorted(axes.keys() - {"fsdp", "model"}):
        raise DataError(
            f"tokens are not generated along {others[0]}",
            where=f"--mesh {others[0]}={axes[others[0]]}",
            why="a token of each row is computed at a time, by all layers",
            fix="the axes fsdp and model",
        )
    if bf.default_backend() == "cpu":
        bf.config.cpu_devices = max(bf.config.cpu_devices, int(np.prod(list(axes.values()))))
    placement.check(config, axes)
    plan = sharded.Plan(bf.make_mesh(tuple(axes.values()), tuple(axes)))
    return placement.Layout(plan, config=placement.grouped(config, axes))


def _tokenizer(options: argparse.Namespace, config: Config) -> tokenizer.Tokenizer:
    if options.model is None or options.bytes:
        return tokenizer.fitting(tokenizer.Bytes(), config)
    return tokenizer.load(options.model, config)


# -- generate --------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
    layout = _for_generation(_config(options.model, options), options.mesh)
    config = layout.config
    params = _loaded(options.model, options, options.dtype, layout, options.quantize)
    if options.adapter is not None:
        params = peft.applied(params, *peft.load(options.adapter, config))
    words = _tokenizer(options, config)
    shown = options.prompt or ["def "]
    prompts = [words.encode(text) for text in shown]
    key = random.key(options.seed)
    sampling = generate.Sampling(
        options.temperature, options.top_p, options.min_p, options.repetition_penalty
    )
    how: Any = {"sampling": sampling, "top_k": options.top_k, "key": key}
    if options.draft is None:
        single = generate.stream(params, config, prompts, options.tokens, page=options.page, **how)
        steps: Any = ([[] if token is None else [token] for token in step] for step in single)
    else:
        smaller = _for_generation(architectures.read(options.draft), options.mesh)
        draft = _loaded(options.draft, options, options.dtype, smaller), smaller.config
        steps = speculative.stream(
            (params, config), draft, prompts, options.tokens, ahead=options.ahead, **how
        )
    texts = [tokenizer.Text(words) for _ in prompts]
    alone = len(prompts) == 1
    began, times = time.perf_counter(), []
    for step in steps:
        if alone and not times:
            _say(shown[0], end="")
        times.append((time.perf_counter(), sum(map(len, step))))
        for row, new in enumerate(step):
            for token in [t for t in new if t not in config.eos]:
                piece = texts[row].add(token)
                shown[row] += piece
                if alone:
                    _say(piece, end="")
    if alone:
        _say(texts[0].rest())
    else:
        for row, text in enumerate(shown):
            _say(f"--- {row}\n{text}{texts[row].rest()}")
    _say(f"time    first tokens after {times[0][0] - began:.2f} s, with compilation")
    if len(times) > 2:  # by the second step, all is compiled
        seconds, made = times[-1][0] - times[1][0], sum(n for _, n in times[2:])
        per = f", {made / len(times[2:]) / len(prompts):.2f} a round and row" if options.draft else ""
        _say(f"rate    {made / seconds:,.1f} tokens/s, {len(prompts)} rows{per}")
    return 0


# -- finetune --------------------------------------------------------------------------------------


def _finetune(options: argparse.Namespace) -> int:
    rank = options.lora or (16 if options.qlora else 0)
    usual = 1e-3 if options.model is None else 1e-4 if rank else 1e-5
    rate = usual if options.lr is None else options.lr
    settings = finetune.Settings(
        options.model, options.data, options.steps, options.batch, options.length, rate, options.seed,
        rank=rank, alpha=options.alpha, targets=tuple(options.targets.split(",")), quantize=options.qlora,
        recompute=options.recompute or options.qlora is not None, accumulate=options.accumulate,
    )  # fmt: skip
    if unknown := sorted(set(settings.targets) - set(finetune.TARGETS)):
        raise DataError(
            f"{unknown[0]!r} is no matrix of a layer",
            where=f"--targets {options.targets}",
            fix=f"some of {','.join(finetune.TARGETS)}",
        )
    out = Path(options.out)
    weights.check_free(out)
    config = _config(options.model, options)
    if config.experts and (of_mlps := sorted({"gate", "up", "down"} & set(settings.targets))) and rank:
        raise DataError(
            f"{of_mlps[0]} of experts has no adapters",
            where=f"--targets {options.targets}",
            why="rows are multiplied by the matrices of their groups, without products of factors",
            fix="--targets qkv,out, or no --lora",
        )
    layout = layouts.layout(
        options.mesh,
        config,
        settings.batch,
        settings.length,
        **mesh_options.plan_of(options),
        recompute=settings.recompute,
    )
    config = layout.config
    finetune.check(settings, layout)
    # updates of 1e-5 are lost in bfloat16: what is trained is float32, and --autocast is for speed
    params = _loaded(options.model, options, options.dtype if rank else "float32", layout, options.qlora)
    words = _tokenizer(options, config)
    dataset = finetune.tokenized(data.load(options.data), words)
    parts = finetune.windows(dataset, settings, config)
    tokens, bar = settings.batch * settings.length, not options.no_progress
    with report.watch(0, settings.steps, tokens, dataset.unit, bar, layout.leads) as watch:
        try:
            result = finetune.run(
                params, config, parts, settings, out, low=options.autocast, layout=layout, watch=watch
            )
        except finetune.Stopped:
            _say(f"interrupted: the state is saved in {out}; the same command goes on")
            return io.STOPPED
    if not layout.leads:
        return 0
    finetune.save(out, result, config, settings)
    before, after = result.history.validation[0][1], result.history.validation[-1][1]
    report.summary(
        {
            "validation loss": f"{before:.3f} before, {after:.3f} after, nats a {dataset.unit}",
            "model": str(out),
            "to try it": f"python -m examples.llm generate --model {out}"
            + " --bytes" * (words.place == "bytes"),
        },
        None,
    )
    return 0


# -- options ---------------------------------------------------------------------------------------


def _say(text: str, end: str = "\n") -> None:
    if bf.process_index() == 0:
        print(text, end=end, flush=True)


def _parser() -> argparse.ArgumentParser:
    def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], Any]:
        def parsed(text: str) -> Any:
            if not least <= (value := kind(text)) <= most:
                raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
            return value

        return parsed

    parser = argparse.ArgumentParser(
        "python -m examples.llm", description="Language models of Hugging Face folders."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> Callable[..., Any]:
        made = commands.add_parser(name, help=text, description=text)
        add = made.add_argument
        add(
            "--model",
            metavar="DIR",
            help="a folder with config.json and safetensors; default: a tiny random model",
        )
        add("--bytes", action="store_true", help="tokens are bytes: no tokenizer is read")
        add(
            "--dtype",
            choices=["float32", "bfloat16", "float16"],
            help="of the weights (default: that of the files)",
        )
        add("--layers", type=number(int, 1), metavar="N", help="of the random model (default: 2)")
        add("--experts", type=number(int, 2), metavar="N", help="of the random model (default: one MLP)")
        add("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
        add("--seed", type=number(int, 0), default=0, metavar="N", help="of random choices (default: 0)")
        return add

    add = command("generate", "Continue prompts.")
    add("--mesh", type=mesh_options.mesh, metavar="AXIS=N,...", help="devices along model and fsdp")
    add("--prompt", action="append", metavar="TEXT", help="several give a batch (default: 'def ')")
    add("--tokens", type=number(int, 1), default=64, metavar="N", help="new tokens of each row (default: 64)")
    add(
        "--temperature",
        type=number(float, 0),
        default=0.0,
        metavar="T",
        help="0 (default): the likeliest token",
    )
    add("--top-k", type=number(int, 1), metavar="K", help="draw from the K likeliest tokens")
    add(
        "--top-p",
        type=number(float, 0, 1),
        metavar="P",
        help="draw from the likeliest tokens of this probability",
    )
    add(
        "--min-p",
        type=number(float, 0, 1),
        metavar="P",
        help="and of this share of the likeliest one's, at least",
    )
    add(
        "--repetition-penalty",
        type=number(float, 1),
        metavar="R",
        help="divide the logits of tokens that occurred",
    )
    add("--quantize", choices=quantized.FORMATS, help="quantize the matrices of the layers")
    add(
        "--adapter", metavar="DIR", help="a folder of PEFT: adapter_config.json and adapter_model.safetensors"
    )
    add(
        "--page",
        type=number(int, 1),
        metavar="N",
        help="keep keys and values in pages of N positions, as many as each row needs; without --draft",
    )
    add("--draft", metavar="DIR", help="a smaller model of the same vocabulary, for speculative decoding")
    add(
        "--ahead",
        type=number(int, 1),
        default=4,
        metavar="N",
        help="tokens that it drafts at a time (default: 4)",
    )

    add = command("finetune", "Train a model further, or a random one from the beginning.")
    mesh_options.add_options(add)
    add("--data", metavar="PATH", help=f"{data.__doc__.splitlines()[0]} Default: the Python standard library")
    add("--out", default="runs/llm", metavar="DIR", help="where to write (default: runs/llm)")
    add("--steps", type=number(int, 1), default=100, metavar="N", help="(default: 100)")
    add("--batch", type=number(int, 1), default=8, metavar="N", help="windows in a step (default: 8)")
    add("--length", type=number(int, 1), default=128, metavar="N", help="tokens of a window (default: 128)")
    add(
        "--lr",
        type=number(float, 0),
        metavar="RATE",
        help="peak learning rate (default: 1e-5; of adapters 1e-4; of the random model 1e-3)",
    )
    add(
        "--lora",
        type=number(int, 0),
        default=0,
        metavar="RANK",
        help="train adapters of this rank (default: all)",
    )
    add(
        "--qlora",
        nargs="?",
        const="nf4",
        choices=quantized.FORMATS,
        help="train adapters (--lora, default: 16) of quantized weights, in nf4 (default) or int8; with --recompute",
    )
    add("--recompute", action="store_true", help="compute each layer again for its gradient: less memory")
    add(
        "--alpha",
        type=number(float, 0),
        default=16.0,
        metavar="A",
        help="scales adapters by A / RANK (default: 16)",
    )
    add("--targets", default="qkv,out", help=f"matrices with adapters, of {','.join(finetune.TARGETS)}")
    add("--autocast", choices=["bfloat16", "float16"], help="compute matmuls in this dtype")
    add("--no-progress", action="store_true", help="lines instead of a progress bar")
    return parser
