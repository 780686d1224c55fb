# ruff: noqa: E501 - a row is a line
"""The table of `tests/e2e/test_wrong_inputs.py`: command lines that are wrong, and what their one sentence must name.

`small` is the training of the tiny model that `tests/e2e/conftest.py` describes. RUN is the folder of a finished run, COPY one of
its own, MODEL the tiny pipeline; other files are those of `tests/wrong_files.py`, in the current directory.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass(frozen=True)
class Row:
    """A command line, its exit code (None: any but 0), what is named, and below that the pattern of the remedy.

    works: it is no error after all, and `named` and `remedy` are of the log. loads: a model is loaded.
    """

    line: str
    named: str
    remedy: str = ""
    code: int | None = 2
    works: bool = False
    loads: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def row(name: str, line: str, named: str, remedy: str = "", code: int | None = 2, **more: Any) -> Any:
    """A parameter of the test."""
    return pytest.param(Row(line, named, remedy, code, **more), id=name)


KEYS = [
    row("mistyped key", "train trainer.stepz=3", "trainer.stepz: ", r"'trainer\.steps'.*--help"),
    row("mistyped block", "train trianer.steps=3", "trianer.steps: ", r"'trainer\.steps'.*--help"),
    row("added key", "train +trainer.stepz=3", "trainer.stepz: ", r"'trainer\.steps'.*--help"),
    row("unknown key", "train rollout.zebra=1", "rollout.zebra: ", "micro_batch_size.*--help"),
    row("last part of a key", "train steps=5", "steps: ", r"'trainer\.steps'"),
    row("last part mistyped", "train lora_rnk=8", "lora_rnk: ", r"'model\.lora_rank'"),
    row("capitals", "train Trainer.Steps=5", "Trainer.Steps: ", r"'trainer\.steps'"),
    row("colon for a dot", "train trainer:steps=5", "trainer:steps=5: ", r"'trainer\.steps'"),
    row("two dots", "train trainer..steps=5", "trainer..steps=5: ", r"'trainer\.steps'"),
    row("exists already", "train +trainer.steps=5", "+trainer.steps: ", "without the plus"),
    row("key of hydra", "train hydra.run.dirr=x", "hydra.run.dirr: ", r"'hydra\.run\.dir'"),
    row("word for number", "train trainer.steps=five", "trainer.steps='five': ", "whole number"),
    row("negative", "train trainer.steps=-1", "trainer.steps=-1: ", "at least 1"),
    row("zero", "train trainer.steps=0", "trainer.steps=0: ", "at least 1"),
    row("fraction", "train trainer.steps=10.5", "trainer.steps=10.5: ", "whole number"),
    row("null", "train trainer.steps=null", "trainer.steps=null: ", "whole number"),
    row("empty value", "train trainer.steps=", "trainer.steps='': ", "whole number"),
    row("yes or no", "train model.gradient_checkpointing=maybe", "model.gradient_checkpointing='maybe': ", "true or false"),
    row("offload", "train model.offload=maybe", "model.offload='maybe': ", "'none'.*'encoders'.*'blocks'"),
    row("offload of quantised blocks", "train model.offload=blocks model.quantize=int8", "model.offload=blocks: ", "model.quantize=none"),
    row("offload of compiled blocks", "train model.offload=blocks model.compile=eager", "model.offload=blocks: ", "model.compile=null"),
    row("list", "train actor.betas=0.9", "actor.betas=0.9: ", r"list, such as \[1,2\]"),
    row("wrong choice", "train sampling.kernel=sde", "sampling.kernel='sde': ", "'ode'.*'flow_sde'.*'ddim'"),
    row("precision", "train model.dtype=bf16", "model.dtype='bf16': ", "'bfloat16'"),
    row("device", "train cluster.device=gpu", "cluster.device='gpu': ", "'cuda'"),
    row("no workers", "train cluster.num_workers=0", "cluster.num_workers=0: ", "at least 1"),
    row("not positive", "train actor.lr=-1", "actor.lr=-1.0: ", "greater than 0"),
    row("above the range", "train actor.ema_decay=1.5", "actor.ema_decay=1.5: ", "at most 1"),
    row("not a number", "train actor.lr=nan", "actor.lr=nan: ", "finite"),
    row("negative height", "train sampling.height=-32", "sampling.height=-32: ", "at least 8"),
    row("negative seed", "train trainer.seed=-1", "trainer.seed=-1: ", "at least 0"),
    row("LoRA rank 0", "train model.lora_rank=0", "model.lora_rank=0: ", "at least 1"),
    row("no denoising", "train sampling.num_inference_steps=0", "sampling.num_inference_steps=0: ", "at least 2"),
    row(
        "one denoising step", "train algorithm=flow_grpo sampling.num_inference_steps=1",
        "sampling.num_inference_steps=1: ", "at least 2",
    ),
    row("no held-out prompts", "train validation.max_prompts=0", "validation.max_prompts=0: ", "at least 1"),
    row("block as key", "train trainer=5", "trainer=5: ", r"trainer\.steps=VALUE"),
    row("list as block", "train reward.scorers=[ocr]", "reward.scorers=['ocr']: ", "dictionary, such as"),
    row("no equals sign", "train trainer.steps", "trainer.steps: ", "key=value.*trainer.steps=VALUE"),
    row("equals sign forgotten", "train trainer.steps 5", "trainer.steps 5: ", "write trainer.steps=5"),
    row("equals sign twice", "train trainer.steps==5", "trainer.steps==5: ", "write trainer.steps=5$"),
    row("no key", "train 'model.path a'", "model.path a: ", "write model.path=a$"),
    row("quotes forgotten", "train data.train=my prompts.txt", "prompts.txt: ", "'data.train=my prompts.txt'"),
    row("open bracket", "train actor.betas=[0.9", "actor.betas=[0.9: ", "not closed"),
    row("brackets in a name", "train 'data.train=a(b).txt'", "data.train=a(b).txt: ", r"\"data.train='a\(b\).txt'\""),
    row("typographic quotes", "train trainer.steps=‘5’", "trainer.steps=‘5’: ", "write trainer.steps=5$"),
    row("two values", "train trainer.seed=1,2", "trainer.seed=1,2: ", r"\[1,2\]"),
    row("decimal comma", "train actor.lr=0,5", "actor.lr=0,5: ", r"point as in 0\.5"),
    row("dashes and a space", "train --trainer.steps 5", "--trainer.steps 5: ", "drop the dashes, write trainer.steps=5"),
    row("dashes", "train --steps=5", "--steps=5: ", "drop the dashes, write trainer.steps=5"),
    row("LoRA to start from is missing", "train model.lora=./nolora", "model.lora='./nolora': ", "hub id", 1),
    row("LoRA to start from is no place", "train model.lora=nolora", "model.lora='nolora': ", "hub id", 1),
    row("LoRA to start from is a pipeline", "train model.lora=MODEL", "model.lora='MODEL' ", "model.path", 1),
    row("LoRA to start from is a run", "train model.lora=RUN", "model.lora='RUN' ", "step_N", 1),
    row("LoRA to start from is damaged", "small model.lora=corrupt.safetensors", "model.lora='corrupt.safetensors': ", "whole", 1),
    row("LoRA to start from is larger", "small model.lora=RUN/checkpoints/step_2 model.lora_rank=2", "model.lora='RUN/checkpoints/step_2' ", "model.lora_rank=4", 1),
    row("merge without a LoRA", "train model.merge_lora=true", "model.merge_lora=true: ", "model.lora"),
    row("resume with another LoRA", "small checkpoint.resume=COPY trainer.steps=3 model.lora=a/b", "model.lora", "resume=never", None),
    row("quantisation", "train model.quantize=int4", "model.quantize='int4': ", "'int8'.*'nf4'"),
    row("merge into quantised weights", "train model.quantize=int8 model.lora=a/b model.merge_lora=true", "model.quantize=int8: ", "model.merge_lora=false"),
    row("resume with other weights", "small checkpoint.resume=COPY trainer.steps=3 model.quantize=int8", "model.quantize", "resume=never", None),
    row("optimizer", "train actor.optimizer=adam", "actor.optimizer='adam': ", "'adamw8bit'"),
    row("dashes inside", "train --lora-rank 8", "--lora-rank 8: ", "write model.lora_rank=8"),
    row("other program's option", "train --config mine.yaml", "--config mine.yaml: ", "write experiment=mine.yaml"),
    row("option of hydra", "train --multirun", "--multirun: ", "key=value without dashes.*--help"),
    row("spaces around =", "train trainer.steps = 5", "trainer.steps = 5: ", "no spaces.*write trainer.steps=5"),
    row("space after =", "train trainer.steps= 5", "trainer.steps= 5: ", "no spaces.*write trainer.steps=5"),
    row("space before =", "train trainer.steps =5", "trainer.steps =5: ", "no spaces.*write trainer.steps=5"),
    row("interpolation", "train 'model.path=${nope}'", "model.path=${nope}: ", "'nope'.*dollar"),
    row("file name with a space", "train 'data.train=my prompts.txt' cluster.device=cuda", "cluster.device=cuda", "", 1),
    row("column of text files", "train data.prompt_key=caption data.train=good.txt cluster.device=cuda",
        "cluster.device=cuda", "", 1),
]  # fmt: skip

EXPERIMENTS = [
    row("unknown experiment", "train experiment=sings", "experiment=sings: there is no such experiment", "'signs'"),
    row("unlike any", "train experiment=zzzz", "experiment=zzzz: there is no such experiment", r"plain, .*\.yaml"),
    row("part of a name", "train experiment=sd35", "experiment=sd35: ", "'sd35_medium_ocr'"),
    row("suffix forgotten", "train experiment=mine", "experiment=mine: ", r"'mine\.yaml'"),
    row("suffix too much", "train experiment=plain.yaml", "experiment=plain.yaml: there is no such file", "'plain'"),
    row("empty experiment", "train experiment=", "experiment is empty: ", "signs"),
    row("unknown algorithm", "train algorithm=flow-grpo", "algorithm=flow-grpo: there is no such algorithm", "'flow_grpo'"),
    row("algorithm unlike any", "train algorithm=zzzz", "algorithm=zzzz: ", "choose one of awm, .*rwr, tempflow_grpo, tree_grpo$"),
    row("two algorithms", "train algorithm=awm algorithm=flow_grpo", "algorithm=awm and algorithm=flow_grpo ", "keep one"),
    row("two names of algorithms", "train algorithm=awm algorithm.name=flow_grpo",
        "algorithm=awm and algorithm.name=flow_grpo ", "keep one"),
    row("two experiments", "train experiment=signs experiment=plain", "experiment=signs and experiment=plain ", "keep one"),
    row("algorithm of a run's file", "train experiment=RUN/config.yaml algorithm=crd", "algorithm=crd: ", "remove it"),
    row("key of another algorithm", "train algorithm.mix=1", "algorithm.mix=1: ", "only diffusion_nft"),
    row("missing file", "train experiment=mien.yaml", "experiment=mien.yaml: there is no such file", r"'mine\.yaml'"),
    row("broken file", "train experiment=broken.yaml", "experiment=broken.yaml: line 2, column 1: ", "correct"),
    row("key twice in a file", "train experiment=twice.yaml", "experiment=twice.yaml: line 5, column 1: ", "key trainer"),
    row("tab in a file", "train experiment=tab.yaml", "experiment=tab.yaml: line 2, column 1: a tab", "spaces"),
    row("dots in a file", "train experiment=dots.yaml", "experiment=dots.yaml: trainer.steps ", "'trainer:'.*'steps:'"),
    row("colon forgotten in a file", "train experiment=colon.yaml", "trainer='steps 3': ", r"trainer\.steps="),
    row("encoding of a file", "train experiment=latin.yaml", "experiment=latin.yaml: ", "UTF-8"),
    row("list in a file", "train experiment=items.yaml", "experiment=items.yaml: ", "trainer: .steps"),
    row("key in a file", "train experiment=stepz.yaml", "trainer.stepz: ", r"'trainer\.steps'"),
    row("type in a file", "train experiment=typed.yaml", "actor.lr='fast': ", "number"),
    row("name taken", "train experiment=signs.yaml", "experiment=signs.yaml: ", "another, or use experiment=signs"),
    # what cannot train
    row("one image a group", "train rollout.n=1", "rollout.n=1: ", "at least 2"),
    row("images without end", "train rollout.n=100000000000", "rollout.n=100000000000", ""),
    row("no noise", "small sampling.noise_level=0", "sampling.noise_level=0: ", "kernel=flow_sde .*noise_level="),
    row("last step", "small sampling.window_range=[1,4]", "sampling.window_range=[1, 4]: ", "end at 3"),
    row("wide window", "small sampling.window_size=4", "sampling.window_size=4: ", r"lower.*sampling\.window_range"),
    row("large micro-batch", "small actor.micro_batch_size=9", "actor.micro_batch_size=9: ",
        r"at most rollout\.micro_batch_size=4"),
]  # fmt: skip

PROMPTS = [
    row("missing prompts", "train data.train=good.text", "data.train=good.text: ", r"good\.txt", 1),
    row("missing prompts, nothing near", "train data.train=nofile.txt", "data.train=nofile.txt: ",
        r"in /\S+: correct the path$", 1),
    row("missing list", "train data.train=sings_train", "data.train=sings_train: ", r"signs_train.*\.jsonl", 1),
    row("missing held-out prompts", "train validation.data=empty.text", "validation.data=empty.text: ", r"empty\.txt", 1),
    row("empty prompts", "train data.train=empty.txt", "data.train=empty.txt: ", "at least one", 1),
    row("folder as prompts", "train data.train=folder", "data.train=folder: ", r"\.txt, \.jsonl, \.csv or \.parquet", 1),
    row("nothing to read", "train data.train=no.txt", "data.train=no.txt: ", "", 1),
    row("row without prompt", "train data.train=rows.jsonl", "data.train=rows.jsonl: ",
        r"rows\.jsonl:3 .*'prompt'.*data\.prompt_key", 1),
    row("broken row", "train data.train=broken.jsonl", "data.train=broken.jsonl: ", r"broken\.jsonl:2 .*correct", 1),
    row("list as row", "train data.train=list.jsonl", "data.train=list.jsonl: ", r"list\.jsonl:1 .*\{\"prompt\"", 1),
    row("number as prompt", "train data.train=number.jsonl", "data.train=number.jsonl: ", r"number\.jsonl:1 .*text", 1),
    row("suffix of prompts", "train data.train=notes.md", "data.train=notes.md: ", r"\.txt, \.jsonl", 1),
    row("parquet without prompt", "train data.train=captions.parquet", "data.train=captions.parquet: ",
        r"captions\.parquet.*'prompt'.*caption.*data\.prompt_key", 1),
    row("no parquet", "train data.train=notparquet.parquet", "data.train=notparquet.parquet: ", "write it anew", 1),
    row("csv prompts without a column", "train data.train=captions.csv", "data.train=captions.csv: ", r"'prompt'.*data\.prompt_key", 1),
    row("encoding of prompts", "train data.train=latin1.txt", "data.train=latin1.txt: ", "UTF-8", 1),
    row("nothing to read for ocr", "train data.train=noquotes.txt", "data.train=noquotes.txt: ", "prompt 0.*double quotes", 1),
    row("second prompt", "train data.train=unquoted.txt", "data.train=unquoted.txt: ", "prompt 1: 'a sign'.*double quotes", 1),
    row("held-out prompts for ocr", "train validation.data=unquoted.txt", "validation.data=unquoted.txt: ",
        "prompt 1: 'a sign'.*double quotes", 1),
    row("single quotes", "train data.train=single.txt", "data.train=single.txt: ", "double quotes", 1),
    row("nothing in quotes", "train data.train=emptyquote.txt", "data.train=emptyquote.txt: ", "double quotes", 1),
    row("other scripts", "train data.train=scripts.txt cluster.device=cuda", "cluster.device=cuda", "", 1),
    row("typographic quotes in a prompt", "train data.train=curly.txt cluster.device=cuda", "cluster.device=cuda", "", 1),
]  # fmt: skip

MODELS = [
    row("missing folder", "train model.path=/nowhere/model", "model.path='/nowhere/model' ", "no folder.*hub id", 1),
    row("empty path", "train model.path=", "model.path is empty: ", "hub id", 1),
    row("folder that is no model", "train model.path=folder", "model.path='folder' ", "model_index.json.*save_pretrained", 1),
    row("file as model", "train model.path=./in_the_way", "model.path='./in_the_way' ", "give the folder", 1),
    row("word as model", "train model.path=sd3", "model.path='sd3' ", "owner/name.*'signs'", 1),
    row("address as model", "train model.path=https://huggingface.co/stabilityai/stable-diffusion-3.5-medium",
        "web address", "model.path=stabilityai/stable-diffusion-3.5-medium", 1),
    row("single file as model", "train model.path=corrupt.safetensors", "model.path='corrupt.safetensors' ",
        "single file.*from_single_file.*save_pretrained", 1),
    row("hub cannot be reached", "small model.path=nobody/nothing", "model.path='nobody/nothing' ",
        "HF_HUB_OFFLINE.*model.path to a folder", 1, loads=True),
    row("recipe without network", "train experiment=sd35_medium_ocr cluster.launcher=local cluster.device=cpu",
        "stable-diffusion-3.5-medium", "HF_HUB_OFFLINE.*model.path to a folder", 1, loads=True),
    row("no GPU", "train cluster.device=cuda", "cluster.device=cuda, ", r"cluster\.device=auto", 1),
    row("ranks in one process", "small cluster.ranks_per_worker=2 cluster.launcher=local", "cluster.ranks_per_worker=2: ",
        "cluster.launcher=ray"),
    row("shards in 8 bits", "small cluster.launcher=ray cluster.ranks_per_worker=2 model.shard=all model.quantize=int8",
        "model.quantize=int8: ", r"model\.shard=none"),
    row("shards compiled", "small cluster.launcher=ray cluster.ranks_per_worker=2 model.shard=all model.compile=inductor",
        "model.compile=inductor: ", r"model\.shard=none"),
    row("shards of one rank", "small model.shard=denoiser", "model.shard=denoiser: ", "cluster.ranks_per_worker"),
    row("open bracket in an expression", "train 'model.lora_targets=\"[\"'", "model.lora_targets='[' ", "null"),
    row("star in an expression", "train 'model.lora_targets=\"*attn*\"'", "model.lora_targets='*attn*' ", r"'\.\*'"),
    row("expression without a match", "small model.lora_targets=to_qq", "model.lora_targets='to_qq' ",
        "SD3Transformer2DModel.*linear_1", 1, loads=True),
    row("argument of the pipeline", "small sampling.call.true_cfg=4", "StableDiffusion3Pipeline ", "'true_cfg'.*sampling.call",
        1, loads=True),
    row("height of 33", "small sampling.height=33", "sampling.height", "", 1, loads=True),
    row("backend of torch.compile", "small model.compile=foo", "model.compile", "", None, loads=True),
    row("learning rate of 1e30", "small actor.lr=1e30", "lr", "", None, loads=True),
    row("no Ray there", "small cluster.launcher=ray", "RAY_ADDRESS=127.0.0.1:1: ", "unset RAY_ADDRESS", 1, loads=True,
        environment={"RAY_ADDRESS": "127.0.0.1:1"}),
]  # fmt: skip

MINE = "'reward.scorers={mine: {path: %s.py}}'"
SCORERS = [
    row("unknown scorer", "train reward.scorers.ocrr.weight=1", "reward.scorers.ocrr: ", r"ocr, pick.*\.path", 1),
    row("spelling of a scorer", "train reward.scorers.pick_score.weight=1", "reward.scorers.pick_score: ", "pickscore", 1),
    row("file as scorer", "train reward.scorers.mine=mine.py", "reward.scorers.mine='mine.py': ", r"mine\.path="),
    row("name as scorers", "train reward.scorers=ocr", "reward.scorers='ocr': ", "ocr: .weight"),
    row("key of a scorer", "train reward.scorers.ocr.wieght=2", "reward.scorers.ocr.wieght: ", r"ocr\.weight'"),
    row("kwarg of a scorer", "train reward.scorers.ocr.kwargs.detct=true", "reward.scorers.ocr.kwargs: ", "detct.*detect", 1),
    row("value of a kwarg", "train reward.scorers.jpeg_compressibility.kwargs.quality=0",
        "reward.scorers.jpeg_compressibility.kwargs: ", "quality=0.*greater than or equal to 1", 1),
    row("number as kwargs", "train reward.scorers.ocr.kwargs=5", "reward.scorers.ocr.kwargs=5: ", "dictionary"),
    row("word as weight", "train reward.scorers.ocr.weight=high", "reward.scorers.ocr.weight='high': ", "number"),
    row("weight twice", "train reward.scorers.ocr.weight=1 reward.scorers.ocr.weight=0", "reward.scorers ", "weight"),
    row("weight 0", "train reward.scorers.ocr.weight=0", "reward.scorers ", r"weight.*reward\.scorers\.ocr\.weight=1"),
    row("no scorers", "train reward.scorers={} trainer.steps=1", "reward.scorers ", "give one, such as"),
    row("scorer with a plus", "train '+reward.scorers.ocr={weight: 1}' trainer.steps=-1", "trainer.steps=-1: "),
    row("reserved name", "train reward.scorers.reward.weight=1", "reward.scorers.reward: ", "another"),
    row("no file of a scorer", "train " + MINE % "nofile", "reward.scorers.mine.path=nofile.py: ", "correct", 1),
    row("syntax error", "train " + MINE % "syntax", "reward.scorers.mine.path=", "SyntaxError.*line 1", 1),
    row("missing package", "train " + MINE % "missing_package", "reward.scorers.mine.path=", "notapackage", 1),
    row("no such function", "train " + MINE % "other", "reward.scorers.mine.function=compute_score: ", "only score;", 1),
    row("too few arguments", "train " + MINE % "fewer", "reward.scorers.mine.kwargs: ", r"\(images, prompts, metadata", 1),
    row("arguments of one image", "train " + MINE % "pair", "reward.scorers.mine.kwargs: ", r"\(images, prompts", 1),
    *(row(f"scorer returns {name}", "small " + MINE % name, "finished", "", 0, works=True, loads=True)
      for name in ("tensors", "arrays", "bools", "uneven")),
    *(row(f"scorer returns {name}", "small " + MINE % name, "mine", remedy, 1, loads=True)
      for name, remedy in {"nothing": "list", "float": "list", "exits": "", "raises": r"raises\.py.*line 2"}.items()),
    *(row(f"scorer returns {name}", "small " + MINE % name, "mine", remedy, 1, loads=True)
      for name, remedy in {"column": "number", "texts": "number", "one_number": "1 score"}.items()),
    row("scorer that never changes", "small trainer.steps=6 " + MINE % "constant", "to every image of the last 5 steps", "", None, loads=True,
        works=True),
]  # fmt: skip

RESUMING = [
    row("resume a finished run", "small checkpoint.resume=COPY trainer.steps=2", "COPY", "finished.*trainer.steps", 0,
        works=True),
    row("resume with another rank", "small checkpoint.resume=COPY trainer.steps=3 model.lora_rank=8", "model.lora_", "", None,
        loads=True),
    row("resume with another seed", "small checkpoint.resume=COPY trainer.steps=3 trainer.seed=5", "trainer.seed", "", None,
        loads=True),
    row("resume with fewer steps", "small checkpoint.resume=COPY trainer.steps=1", "trainer.steps", "", None, loads=True),
    row("resume nothing", "small checkpoint.resume=nope", "checkpoint.resume=nope: ", "auto.*never", None),
    row("resume a folder without a run", "small checkpoint.resume=folder", "checkpoint.resume=folder: ", "auto.*never", None),
    row("resume=true", "small checkpoint.resume=true", "checkpoint.resume=true: ", "auto.*never"),
    row("folder of another run", "small hydra.run.dir=COPY", "hydra.run.dir=COPY: ", "another.*checkpoint.resume"),
    row("file in the way", "small hydra.run.dir=in_the_way", "hydra.run.dir=in_the_way: ", "another folder"),
    row("file on the way", "small hydra.run.dir=in_the_way/run", "hydra.run.dir=in_the_way/run: ", "another folder"),
    row("folder that cannot be", "small hydra.run.dir=/proc/gerl", "hydra.run.dir=/proc/gerl: ", "another folder"),
    row("no folder", "small hydra.run.dir=", "hydra.run.dir is empty: ", "folder"),
]  # fmt: skip

SHARP = "reward.scorers.sharpness.weight=1"
SCORING = [
    row("score nothing", "score", "images is missing: ", r"give images=a folder of images \(png, jpg, webp\).*--help"),
    row("score without out", "score images=images prompt=x", "out is missing: ", "out=folder"),
    row("score a missing folder", "score images=nofolder out=o", "images=nofolder does not exist: ", "folder", 1),
    row("score an empty folder", "score images=folder out=o", "images=folder has no image: ", r"\.png", 1),
    row("score a text file", "score images=good.txt out=o", "images=good.txt ", r"\.jsonl or \.csv", 1),
    row("score without prompts", "score images=images out=o", "0.png has no prompt: ", "prompts=FILE or prompt=TEXT", 1),
    row("score with too few prompts", f"score images=images prompts=noquotes.txt out=o {SHARP}", "prompts=noquotes.txt ",
        "2 prompts.*3 images.*prompt=TEXT", 1),
    row("score with both", f"score images=images prompts=good.txt prompt=x out=o {SHARP}", "prompts and prompt ", "keep"),
    row("score a damaged image", f"score images=damaged prompt=x out=o {SHARP}", "damaged/1.png ", "replace or remove", 1),
    row("score nothing in quotes", "score images=images prompt=hello out=o", "images=images: ", "double quotes", 1),
    row("score a table without prompts", f"score images=titles.csv out=o {SHARP}", "titles.csv", "data.prompt_key", 1),
    row("score into a folder with files", f"score images=images prompt=x out=full {SHARP}", "gallery.html", "", 0, works=True,
        loads=True),
    row("score into a file", f"score images=images prompt=x out=in_the_way {SHARP}", "out=in_the_way: ", "another"),
    row("score, mistyped", "score image=images prompt=x out=o", "image: ", "'images'"),
    row("score, batch of 0", "score images=images prompt=x out=o batch=0", "batch=0: ", "at least 1"),
    row("score, batch of two", "score images=images prompt=x out=o batch=two", "batch=two: ", "number"),
    row("score, dashes", "score --images images --out o", "--images images: ", "write images=images"),
    row("score without network", "score images=images prompt=x out=o reward.scorers.pickscore.weight=1", "pickscore", "model=",
        1, loads=True),
    row("score with texts", "score images=images prompt=x out=o 'reward.scorers={mine: {path: texts.py}}'", "mine", "number", 1,
        loads=True),
]  # fmt: skip

EVALUATION = "model=MODEL cluster.launcher=local cluster.device=cpu out=o prompts=good.txt " + SHARP
EVALUATING = [
    row("evaluate nothing", "evaluate", "out is missing: ", "out=folder"),
    row("evaluate a missing LoRA", "evaluate lora=nolora out=o", "lora=nolora: ", "give a LoRA"),
    row("evaluate a damaged LoRA", f"evaluate lora=corrupt.safetensors {EVALUATION}", "corrupt.safetensors ",
        r"give a \.safetensors file", 1),
    row("evaluate a folder without a LoRA", "evaluate lora=folder out=o", "lora=folder: ", "pytorch_lora_weights.safetensors; give a LoRA"),
    *(row(f"evaluate {name}", f"evaluate lora={name}.safetensors {EVALUATION}", f"{name}.safetensors ", remedy, 1, loads=True)
      for name, remedy in {"flux": "StableDiffusion3Pipeline.*give the model", "sd15_kohya": "StableDiffusion3Pipeline",
                           "wider": "SD3|StableDiffusion3", "no_lora": "StableDiffusion3Pipeline"}.items()),
    row("evaluate no images", "evaluate images=0 out=o", "images=0: ", "at least 1"),
    row("evaluate missing prompts", "evaluate prompts=zzz.txt out=o", "prompts=zzz.txt: ", "correct|did you mean", 1),
    row("evaluate a missing model", "evaluate model=./nowhere prompts=good.txt out=o", "model.path='./nowhere' ", "correct", 1),
    row("evaluate an address", "evaluate model=https://huggingface.co/owner/name prompts=good.txt out=o", "web address",
        "model.path=owner/name", 1),
    row("evaluate into a folder with files", f"evaluate {EVALUATION} out=full".replace("out=o ", ""), "gallery.html", "", 0,
        works=True, loads=True),
    row("evaluate the same twice", "evaluate lora=RUN,RUN out=o prompts=good.txt", "lora: RUN is given twice", "lora.NAME=PATH.*keep one"),
    row("evaluate, two experiments", "evaluate experiment=signs experiment=plain out=o", "experiment=signs and ", "keep one"),
    row("evaluate, key of training", "evaluate trainer.steps=3 out=o", "trainer.steps: ", "it has model, lora"),
]  # fmt: skip

OTHERS = [
    row("export nothing", "export", "run is missing: ", "run=a run folder"),
    row("export a missing run", "export run=nope out=o", "run=nope does not exist: ", "give a run folder"),
    row("export a format", "export run=RUN out=o format=comfyui", "format=comfyui: ", "diffusers or peft or kohya"),
    row("export a missing step", "export run=RUN out=o step=99", "step=99: ", "of 2", 1),
    row("export the best step", "export run=RUN out=o step=best", "step=best: ", "number of a trainer step"),
    row("export a negative step", "export run=RUN out=o step=-1", "step=-1: ", "number of a trainer step"),
    row("export into a folder with files", "export run=RUN out=full", "out=full: ", "another.*overwrite=true"),
    row("export into a file", "export run=RUN out=in_the_way", "out=in_the_way: ", "give a folder"),
    row("export weights", "export run=RUN out=o weights=avg", "weights=avg: ", "ema or raw"),
    row("export, yes", "export run=RUN out=o overwrite=yes", "overwrite=yes: ", "false or true"),
    row("export a LoRA", "export run=RUN/checkpoints/step_2/lora out=o", "lora has no checkpoints: ", "give a run folder"),
    row("export without a key", "export RUN out=o", "RUN: ", "such as run=RUN;"),
    row("train without a key", "train signs", "signs: ", "such as experiment=signs;"),
    row("serve without a key", "serve ocr", "ocr: ", "such as scorer=ocr;"),
    row("export, mistyped", "export rum=RUN out=o", "rum: ", "'run'"),
    row("export without configuration", "export run=BARE out=o", "config.yaml cannot be read", "alpha"),
    row("report of a missing run", "report nope", "nope is no run folder: ", "give the folder", 1),
    row("report of no run", "report run=folder", "folder is no run folder: ", "give the folder", 1),
    row("report of nothing", "report", "run is missing: ", "run=the run folder"),
    row("report of two runs", "report RUN RUN", "run is given twice: ", "keep one"),
    row("report of a run", "report run=COPY", "report.html", "", 0, works=True),
    row("report, mistyped", "report folder=RUN", "folder: ", "it has run"),
    row("preflight of an experiment", "preflight experiment=sd35", "experiment=sd35: ", "'sd35_medium_ocr'"),
    row("preflight, mistyped", "preflight trainer.stepz=1", "trainer.stepz: ", r"'trainer\.steps'"),
    row("preflight, dashes", "preflight --out=x.json", "--out=x.json: ", "write out=x.json"),
    row("signal of one batch", "preflight signal=1", "signal=1: ", "at least 2"),
    row("signal, no number", "preflight signal=x", "signal=x: ", "a whole number"),
    row("signal without end", "preflight signal=99999999", "signal=99999999: ", "at most 1000000; lower it"),
    row("preflight into nowhere", "preflight out=/nowhere/x.json", "out=/nowhere/x.json: ", "a folder that is there"),
    row("preflight into a text file", "preflight out=x.txt", "out=x.txt: ", r"a \.json file"),
    row("preflight without network", "preflight experiment=sd35_medium_ocr cluster.device=cpu", "stable-diffusion-3.5-medium",
        "HF_HUB_OFFLINE.*model.path to a folder", 1, loads=True),
    row("preflight without a GPU", "preflight cluster.device=cuda", "cannot train: cluster.device=cuda", "cluster.device=auto or cpu", 1),
    row("serve nothing", "serve", "scorer is missing: ", "ocr"),
    row("serve a scorer", "serve scorer=ocrr", "reward.scorers.ocrr: ", "ocr, pick", 1),
    row("serve, mistyped", "serve scorr=ocr", "scorr: ", "'scorer'"),
    row("serve at a port", "serve scorer=sharpness port=eighty", "port='eighty': ", "whole number"),
    row("serve at a high port", "serve scorer=sharpness port=99999", "port=99999: ", "65535"),
    row("serve anybody", "serve scorer=sharpness host=0.0.0.0", "host=0.0.0.0 ", "token_env or token_file.*allow_anonymous"),
    row("serve without the token", "serve scorer=sharpness token_file=nope", "token_file", "nope"),
    row("serve a kwarg", "serve scorer=sharpness kwargs.zebra=1", "kwargs: zebra=1 ", "sharpness takes none", 1),
    row("serve a missing file", "serve scorer=mine path=nofile.py", "nofile.py", "correct the path", 1),
]  # fmt: skip

TABLE = [*KEYS, *EXPERIMENTS, *PROMPTS, *MODELS, *SCORERS, *RESUMING, *SCORING, *EVALUATING, *OTHERS]
