"""The trainer of the command line: TRL's `SFTTrainer` with an objective, which drops rows that are too long."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoProcessor, AutoTokenizer
from trl import SFTTrainer, get_peft_config, get_quantization_config, is_conversational
from trl.trainer.utils import create_model_from_path

from otloss_llm.cli.rows import HUB_NAME, check_tokens, naming_rows
from otloss_llm.cli.settings import Request, RunConfig
from otloss_llm.costs.named import load_cost
from otloss_llm.costs.tokenizer_numbers import tokenizer_of
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.evaluation.perplexity import check_vocabulary, context_length
from otloss_llm.models.heads import count_embeddings, is_encoder_decoder
from otloss_llm.training.batches import TOKEN_WEIGHT, label_counts
from otloss_llm.training.trainer import ObjectiveMixin

logger = logging.getLogger(__name__)
LONG_ROWS = "raise it where the context allows, or cut text into blocks with --packing true --packing_strategy wrapped"


class CommandTrainer(ObjectiveMixin, SFTTrainer):
    """`SFTTrainer` with an objective; rows longer than `max_length` are dropped with a count, and not cut.

    Args:
        load_cost: returns the transport cost for a model and its `tokenizer=`, to which TRL may have added the tokens
            of a chat template; None for the cost of the objective.
    """

    def __init__(self, *args: Any, load_cost: Callable[..., TokenCost] | None = None, **kwargs: Any) -> None:
        self._load_cost = load_cost
        super().__init__(*args, **kwargs)

    def _choose_cost(self, model: Any) -> TokenCost | str | None:
        return "auto" if self._load_cost is None else self._load_cost(model, tokenizer=self.processing_class)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, packing: bool, *others: Any) -> Any:
        """Drop rows that are too long, and let TRL prepare the rest. Packing that splits rows loses none."""
        splits = packing and args.packing_strategy != "bfd"
        if args.max_length is not None and not splits:
            uncut = copy.copy(args)  # not by `replace`: with DeepSpeed the newest arguments must live on
            uncut.max_length = None
            rows = super()._prepare_dataset(dataset, processing_class, uncut, False, *others)
            dataset = rows.filter(lambda ids: len(ids) <= args.max_length, input_columns="input_ids")
            if hasattr(rows, "__len__"):
                _report_dropped(len(rows) - len(dataset), len(rows), args.max_length)
            elif next(iter(dataset), None) is None:
                raise ValueError(f"all rows of the stream are longer than --max_length {args.max_length}; {LONG_ROWS}.")
        return super()._prepare_dataset(dataset, processing_class, args, packing, *others)


def _report_dropped(dropped: int, rows: int, longest: int) -> None:
    """Raises ValueError if no row is left."""
    if not dropped:
        return
    text = f"{dropped} of {rows} rows are longer than --max_length {longest}"
    if dropped == rows:
        raise ValueError(f"{text}, and none is left; {LONG_ROWS}.")
    logger.warning("%s and were dropped; %s", text, LONG_ROWS)


def load_model(request: Request) -> tuple[Any, Any]:
    """Return the model and its tokenizer as `trl sft` loads them; the folder of an adapter with its base model."""
    args, model_args = request.args, request.model
    settings = {
        "revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation, "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }  # fmt: skip
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        settings["quantization_config"] = quantization
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        settings["device_map"] = None
    name = model_args.model_name_or_path
    path = str(Path(name).expanduser())
    if not (Path(path).is_dir() or HUB_NAME.fullmatch(name)):
        raise FileNotFoundError(f"there is no model folder {name!r} in {Path.cwd()}; check the path.")
    try:
        has_adapter = (Path(path) / "adapter_config.json").is_file()
        model = _load_adapter(path, settings) if has_adapter else create_model_from_path(path, **settings)
        return model, AutoProcessor.from_pretrained(
            path, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # the last two for files that are cut off
        raise ValueError(f"the model {name!r} cannot be loaded: {error}") from error


def _load_adapter(path: str, settings: dict[str, Any]) -> Any:
    """Return the adapter in a folder, on a model of the class that it was trained on.

    The automatic classes of PEFT and transformers may take another one, in which its layers have other names.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ImportError(f"{path!r} is the folder of an adapter, which needs peft: pip install peft") from error
    try:
        config = PeftConfig.from_pretrained(path)
    except KeyError as error:
        raise ValueError(f"PEFT knows no adapter of the type {error}; install a newer one.") from error
    name = config.base_model_name_or_path
    try:
        base = create_model_from_path(name, **settings | {"revision": config.revision})
    except OSError as error:
        raise ValueError(f"its base model {name!r} is not there, in {Path.cwd()} or on the hub: {error}") from error
    if (Path(path) / "tokenizer_config.json").is_file():
        tokens = len(AutoTokenizer.from_pretrained(path, trust_remote_code=settings["trust_remote_code"]))
        if tokens > count_embeddings(base):  # those of a chat template
            base.resize_token_embeddings(tokens)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys", UserWarning)
        try:
            return PeftModel.from_pretrained(base, path)
        except UserWarning as error:  # the other weights of the adapter would be new ones
            raise ValueError(f"the adapter does not fit {type(base).__name__}. {error}") from error


def build_trainer(request: Request, model: Any, tokenizer: Any, train: Any, evaluation: Any, **settings: Any) -> Any:
    """Return the trainer of a command.

    Raises:
        ValueError: the rows, the model and the objective do not go together.
    """
    options, first = request.objective, next(iter(train))
    if is_encoder_decoder(model):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, whose rows TRL does not prepare; train it in Python, with "
            "class Trainer(ObjectiveMixin, Seq2SeqTrainer)."
        )
    args = _fitted(request.args, first, model, tokenizer)
    if request.model.use_peft:
        _check_layers(model, request.model)
    for rows in (train, evaluation):
        if rows is not None and "input_ids" in next(iter(rows)):
            completion_only = args.completion_only_loss
            check_tokens(rows, count_embeddings(model), packing=args.packing, completion_only=completion_only)
    load = None
    if options.cost_embedding is not None:
        load = partial(
            load_cost, options.cost_embedding, seed=args.seed, kind=options.cost_kind, numbers=options.numbers
        )
    try:
        with naming_rows(train, evaluation, args=args):
            trainer = CommandTrainer(
                model=model, args=args, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer,
                peft_config=get_peft_config(request.model), objective=options.parsed, load_cost=load, impl=options.impl,
                numbers=options.numbers if load is None else None, chunk_size=options.chunk_size, **settings,
            )  # fmt: skip
    except (RuntimeError, AttributeError, LookupError, TypeError, TemplateError) as error:
        # A template that raises, or a report to a package that is not installed.
        raise ValueError(f"the trainer cannot be built: {error}") from error
    counts = label_counts(trainer.train_dataset, count_embeddings(trainer.model), shifted=True)
    if counts is not None and not counts.sum():  # None for a stream
        raise ValueError("no token of the rows is trained on: all are empty, or masked; check the columns.")
    return trainer


def _check_layers(model: Any, settings: Any) -> None:
    """Raise ValueError for the name of an option that no layer or parameter of the model has: PEFT leaves it out."""
    layers, parameters = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    options = {"lora_target_modules": layers, "lora_modules_to_save": layers, "lora_target_parameters": parameters}
    for option, paths in options.items():
        names = getattr(settings, option)
        for name in names if isinstance(names, list) else []:  # else a pattern, or all linear layers
            if not any(f".{path}".endswith(name if option == "lora_modules_to_save" else f".{name}") for path in paths):
                endings = sorted({path.rpartition(".")[2] for path in paths} - {""})
                near = get_close_matches(name, endings, n=1)
                raise ValueError(
                    f"--{option} has {name!r}, which no path in {type(model).__name__} ends in"
                    f"{f' (did you mean {near[0]!r}?)' if near else ''}; expected some of "
                    f"{', '.join(part for part in endings if not part.isdigit())}."
                )


def _fitted(args: Any, row: dict[str, Any], model: Any, tokenizer: Any) -> Any:
    """Return the arguments with what follows from the rows and the model: answers alone, and a length in its context.

    Raises ValueError unless the model writes tokens, all of the tokenizer, and conversations have a template.
    """
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} is not a causal language model; take a model that writes text.")
    check_vocabulary(model, 0, max(tokenizer_of(tokenizer).get_vocab().values()))
    if TOKEN_WEIGHT in row:
        raise ValueError(
            f"the rows have a column {TOKEN_WEIGHT}, which TRL's collator drops; remove it (dataset.remove_columns), "
            "or train in Python with ObjectiveTrainer, which uses it."
        )
    template = args.chat_template_path
    is_file = template is not None and (Path(template).suffix in (".jinja", ".j2") or not HUB_NAME.fullmatch(template))
    if is_file and not Path(template).exists():
        raise FileNotFoundError(f"--chat_template_path is {template!r}, of which there is no file in {Path.cwd()}.")
    if is_conversational(row) and not (tokenizer.chat_template or template):
        raise ValueError("the rows are conversations, and the model has no chat template; give --chat_template_path.")
    _warn_of_two_starts(row, tokenizer_of(tokenizer), args.dataset_text_field)
    longest, context = args.max_length, context_length(model)
    if longest is not None and context is not None and context < longest:
        if longest != RunConfig.max_length:  # nothing is said of a default
            logger.warning("--max_length %d is more than the context of the model: %d is taken", longest, context)
        longest = context
    only_answers = "messages" in row if args.assistant_only_loss is None else args.assistant_only_loss
    only_completions = args.completion_only_loss
    if only_completions is None and {"input_ids", "completion_mask"} <= row.keys():  # as TRL does for text
        only_completions = True
    # The model is loaded already, so that its settings go.
    return replace(
        args, max_length=longest, assistant_only_loss=only_answers, completion_only_loss=only_completions,
        model_init_kwargs=None,
    )  # fmt: skip


def _warn_of_two_starts(row: dict[str, Any], tokenizer: Any, text_field: str) -> None:
    """Warn if the first row begins with the token that the tokenizer puts before each text, as templates render it."""
    start = tokenizer.bos_token_id
    if "input_ids" in row or start is None or tokenizer("a")["input_ids"][:1] != [start]:
        return
    for name in dict.fromkeys(("prompt", text_field)):
        text = row.get(name)
        if isinstance(text, str) and tokenizer(text[:100])["input_ids"][:2] == [start, start]:  # the rest may be long
            logger.warning(
                "%s begins with %s, and the tokenizer puts another one before each text; leave it out of the rows, or "
                "give them as messages", name, tokenizer.bos_token,
            )  # fmt: skip
