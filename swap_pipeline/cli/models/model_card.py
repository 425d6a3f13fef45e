"""The model card of an exported network: Markdown with a YAML header, as on the Hugging Face hub."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML

from swap_pipeline import __version__
from swap_pipeline.cli.models.exported import Exported
from swap_pipeline.config.instances import PHASES
from swap_pipeline.config.params import Params
from swap_pipeline.config.reading import read_params
from swap_pipeline.errors import SwapError, printable
from swap_pipeline.storage.files import read_plain

_PARAMS = Path("params.yaml")
_CARD = """\
---
{front}---

# {title}

An image classifier with {num_classes} classes, made with swap-pipeline {version} (Stochastic Weight Averaging in
Parallel, [SWAP](https://arxiv.org/abs/2001.02312)).

## Input and output

`images`: uint8, N×{shape}, pixels from 0 to 255; any N. {resize} Normalisation is part of the model.

`logits`: float32, N×{num_classes}; their softmax has the probabilities of these classes, in this order:

```json
{classes}
```

## Use
{use}
## Evaluation

{evaluation}
{files}
{params}"""
_USE = {
    "model.onnx": """
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(None, {"images": images})  # a numpy array
```
""",
    "model.pt2": """
```python
import torch

model = torch.export.load("model.pt2").module()
logits = model(images)  # a tensor
```
""",
}


def model_card(checkpoint: Path, info: Mapping[str, Any], exported: Exported, *, licence: str | None) -> str:
    """The text of the card; data and params are known of a checkpoint that this project made."""
    params = _params_of(checkpoint)
    name = info["model"]["name"]
    data = None if params is None else params.data.name
    title = f"{name}, trained on {data}" if data else name
    channels, height, width = info["shape"]
    resize = f"Bring images to {width}×{height} pixels, {'grey' if channels == 1 else 'RGB'}."
    if info.get("view") is not None:
        resize += " In tests, the shorter side was resized to 8/7 of that, and the middle was cut out."
    num_images = max(compared.num_images for compared in exported.comparisons.values())
    evaluation = f"It was not evaluated here: the files were compared on {num_images} random images."
    if exported.accuracy is not None:
        evaluation = f"{100 * exported.accuracy:.2f} % accuracy on {num_images:,} test images."
    card = _CARD.format(
        front=_front(title, name, data, exported, licence),
        title=printable(title),
        num_classes=len(info["classes"]),
        version=__version__,
        shape="×".join(map(str, info["shape"])),
        resize=resize,
        classes=json.dumps(info["classes"], ensure_ascii=False, indent=0),
        use="".join(_USE[file] for file in exported.comparisons),
        evaluation=evaluation,
        files=_files(exported),
        params=_params_text(params),
    )
    return card.rstrip() + "\n"


def _front(title: str, name: str, data: str | None, exported: Exported, licence: str | None) -> str:
    """What the hub reads. Its fields have fixed names; a licence is for the user to choose."""
    front: dict[str, Any] = {"pipeline_tag": "image-classification", "tags": ["swap", "image-classification"]}
    if "model.onnx" in exported.comparisons:
        front["tags"].append("onnx")
    if licence is not None:
        front["license"] = licence
    if data is not None:
        front["datasets"] = [data]
    if exported.accuracy is not None:
        front["metrics"] = ["accuracy"]
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": data or "unknown", "type": data or "unknown", "split": "test"},
            "metrics": [{"type": "accuracy", "value": round(exported.accuracy, 6)}],
        }
        front["model-index"] = [{"name": title, "results": [result]}]
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.allow_unicode = False, True
    yaml.dump(front, text)
    return text.getvalue()


def _files(exported: Exported) -> str:
    rows = [
        f"| `{name}` | {compared.num_same:,} of {compared.num_images:,} | {compared.difference:.2g} |"
        for name, compared in exported.comparisons.items()
    ]
    head = f"| file | same class as the network ({exported.images} images) | largest difference of a logit |"
    return "\n".join(["", head, "| --- | ---: | ---: |", *rows, "", f"Exported with torch {torch.__version__}."])


def _params_of(checkpoint: Path) -> Params | None:
    """Of the project, if the checkpoint is one of its outputs."""
    folders = [(Path("checkpoints") / phase).resolve() for phase in PHASES]
    if not set(folders) & set(checkpoint.resolve().parents):
        return None
    try:
        return read_params(_PARAMS)
    except SwapError:
        return None


def _params_text(params: Params | None) -> str:
    if params is None:
        return ""
    return f"\n## Params\n\n```yaml\n{read_plain(_PARAMS).decode().strip()}\n```\n"
