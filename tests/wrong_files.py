"""The files that the command lines of `tests/wrong_inputs.py` name."""

SIGN = 'a red sign that reads "PIN"\n'
SCORE = "def compute_score(images, prompts, metadata):\n    "
FILES: dict[str, str | bytes] = {
    # prompts
    "good.txt": SIGN,
    "my prompts.txt": SIGN,
    "empty.txt": "\n  \n",
    "empty.json": "{}",
    "noquotes.txt": "a cat on a mat\na dog\n",
    "scripts.txt": 'ein Schild: "GRÜSSE"\n写着 "你好" 的牌子\n',
    "curly.txt": "a red sign that reads \N{LEFT DOUBLE QUOTATION MARK}PIN\N{RIGHT DOUBLE QUOTATION MARK}\n",
    "single.txt": "a red sign that reads 'OPEN'\n",
    "emptyquote.txt": 'a red sign that reads ""\n',
    "unquoted.txt": 'a sign that reads "1"\na sign\n',
    "latin1.txt": "caf\xe9\n".encode("latin-1"),
    "notes.md": "a\n",
    "rows.jsonl": '{"prompt": "a"}\n\n{"text": "482"}\n',
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    "number.jsonl": '{"prompt": 3}\n',
    "list.jsonl": '["a"]\n',
    "captions.csv": "caption\na\n",
    "semicolons.csv": 'prompt;text\na red sign that reads "A", lit;A\n',
    "headless.csv": "a red cube\na cat\n",
    "twice.jsonl": '{"prompt": "a", "prompt": "b"}\n',
    "sources.jsonl": '{"prompt": "a", "data_source": ["ocr"]}\n',
    "notparquet.parquet": "hello",
    # images to train on
    "pairs.jsonl": '{"prompt": "a", "chosen": "images/0.png", "rejected": "images/1.png"}\n',
    "singles.jsonl": '{"prompt": "a", "image": "images/0.png"}\n',
    "disliked.jsonl": '{"prompt": "a", "image": "images/0.png", "label": false}\n',
    "ties.jsonl": '{"prompt": "a", "images": ["images/0.png", "images/1.png"], "ranks": [1, 1]}\n',
    "lost.jsonl": '{"prompt": "a", "chosen": "images/0.png", "rejected": "images/9.png"}\n',
    "nopicture.jsonl": '{"prompt": "a", "image": "good.txt"}\n',
    "three.jsonl": '{"prompt": "a", "images": ["images/0.png", "images/1.png", "images/2.png"], "ranks": [1, 2, 3]}\n',
    # experiments
    "voted/journal.jsonl": '{"vote": 1}\n',
    "stepz.yaml": "trainer:\n  stepz: 3\n",
    "typed.yaml": "actor:\n  lr: fast\n",
    "broken.yaml": "trainer: [\n",
    "twice.yaml": "trainer:\n  steps: 3\nactor:\n  lr: 1.0e-5\ntrainer:\n  seed: 1\n",
    "tab.yaml": "trainer:\n\tsteps: 3\n",
    "dots.yaml": "trainer.steps: 3\n",
    "colon.yaml": "trainer:\n  steps 3\n",
    "latin.yaml": b"# \xe9\ntrainer: {}\n",
    "items.yaml": "- trainer\n",
    "signs.yaml": "trainer:\n  steps: 3\n",
    "mine.yaml": "trainer:\n  steps: 3\n",
    # scorers
    "other.py": "def score(images, prompts, metadata):\n    return [0.0] * len(images)\n",
    "fewer.py": "def compute_score(images):\n    return [0.0] * len(images)\n",
    "pair.py": "def compute_score(image, prompt):\n    return 0.0\n",
    "trl.py": "def compute_score(prompts, completions, **kwargs):\n    return [0.0] * len(prompts)\n",
    "awaits.py": "async def compute_score(images):\n    return [0.0] * len(images)\n",
    "kind.py": "class compute_score:\n    def __call__(self, images):\n        return [0.0] * len(images)\n",
    "more.py": "def compute_score(images, target, strict):\n    return [0.0] * len(images)\n",
    "flow.py": f"{SCORE}return [0.5] * len(images), {{}}\n",
    "syntax.py": "def compute_score(images, prompts, metadata) return\n",
    "missing_package.py": "import notapackage\n",
    "tensors.py": f"import torch\n{SCORE}return torch.arange(len(images)) / 8\n",
    "arrays.py": f"import numpy as np\n{SCORE}return np.arange(len(images)) / 8\n",
    "column.py": f"import numpy as np\n{SCORE}return np.ones((len(images), 1))\n",
    "texts.py": f"{SCORE}return ['0.5'] * len(images)\n",
    "nothing.py": f"{SCORE}pass\n",
    "one_number.py": f"{SCORE}return [0.5]\n",
    "float.py": f"{SCORE}return 0.5\n",
    "bools.py": f"{SCORE}return [i % 2 == 0 for i in range(len(images))]\n",
    "uneven.py": f"{SCORE}return {{'score': [i / 8 for i in range(len(images))], 'size': [1.0] * len(images)}}\n",
    "exits.py": f"import sys\n{SCORE}sys.exit(3)\n",
    "raises.py": f"{SCORE}return [1 / 0] * len(images)\n",
    "constant.py": f"{SCORE}return [0.5] * len(images)\n",
    # images, and things in the way
    "images/0.png": b"", "images/1.png": b"", "images/2.png": b"",  # made by the test
    "damaged/0.png": b"", "damaged/1.png": "hello",
    "titles.csv": "image,caption\nimages/0.png,a\n",
    "in_the_way": "a file\n",
    "full/file": "mine\n",
    "folder/readme": "no pipeline\n",
    "corrupt.safetensors": "no safetensors file at all, but long enough to be looked at",
}  # fmt: skip
# LoRAs of other models, by file: tensors as (name, shape)
LORAS: dict[str, dict[str, tuple[int, ...]]] = {
    "flux.safetensors": {
        f"transformer.single_transformer_blocks.0.attn.to_q.lora_{half}.weight": shape
        for half, shape in (("A", (4, 64)), ("B", (64, 4)))
    },
    "sd15_kohya.safetensors": {
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": (4, 64),
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": (64, 4),
        "lora_unet_down_blocks_0_attentions_0_proj_in.alpha": (),
    },
    "wider.safetensors": {
        f"transformer.transformer_blocks.0.attn.to_q.lora_{half}.weight": shape
        for half, shape in (("A", (4, 1536)), ("B", (1536, 4)))
    },
    "no_lora.safetensors": {"weight": (4, 4)},
}
