"""The arguments of a user's function, by the names of its parameters."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gerl.errors import RewardError
from gerl.rewards.scorers.calling import Call

IMAGES, P, M = ["image"], ["prompt"], [{"a": 1}]


class Reward:
    def __call__(self, prompts: Any, images: Any) -> Any:
        return images, prompts

    def method(self, metadata: Any, pictures: Any) -> Any:
        return pictures, metadata


class Module(torch.nn.Module):
    def forward(self, captions: Any, img: Any) -> Any:
        return img, captions


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:  # takes no keywords
        return function(*args)

    return inner


def builtin_like(*args: Any) -> Any:
    return args


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        (lambda images, prompts, metadata: (images, prompts, metadata), {}, (IMAGES, P, M)),
        (lambda prompts, images: (images, prompts), {}, (IMAGES, P)),
        (lambda metadata, images: (images, metadata), {}, (IMAGES, M)),
        (lambda captions, imgs: (imgs, captions), {}, (IMAGES, P)),
        (lambda image: image, {}, IMAGES),
        (lambda x: x, {}, IMAGES),
        (lambda x, y, z: (x, y, z), {}, (IMAGES, P, M)),
        (lambda prompts, x: (x, prompts), {}, (IMAGES, P)),
        (lambda images, threshold=0.5: (images, threshold), {}, (IMAGES, 0.5)),
        (lambda images, prompts=None, text="a": (images, prompts, text), {}, (IMAGES, P, "a")),
        (lambda images, threshold, prompts: (images, threshold, prompts), {"threshold": 3}, (IMAGES, 3, P)),
        (lambda images, **more: (images, more), {"a": 1}, (IMAGES, {"a": 1})),
        (lambda images, *, metadata: (images, metadata), {}, (IMAGES, M)),
        (functools.partial(lambda images, prompts, scale: (images, prompts, scale), scale=2), {}, (IMAGES, P, 2)),
        (decorated(lambda prompts, images: (images, prompts)), {}, (IMAGES, P)),
        (builtin_like, {}, (IMAGES, P, M)),
        (Reward(), {}, (IMAGES, P)),
        (Reward().method, {}, (IMAGES, M)),
        (Module(), {}, (IMAGES, P)),
    ],
)
def test_a_parameter_gets_what_its_name_says(
    function: Callable[..., Any], kwargs: dict[str, object], expected: object
) -> None:
    assert Call("key", "f", function, kwargs)(IMAGES, P, M) == expected  # type: ignore[arg-type]


async def awaited(images: Any) -> Any: ...


async def awaited_parts(images: Any) -> Any:
    yield 1


class Awaited:
    async def __call__(self, images: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda prompts, completions, **kwargs: None, "TRL.*rename its parameter completions to images"),
        (lambda completions: None, "TRL"),
        (lambda images, target: None, ""),
        (lambda images, target, x, y: None, r"missing a required argument: 'y'.*key\.kwargs"),
        (lambda: None, "takes none"),
        (lambda threshold=1: None, "takes none"),
        (Reward, r"is a class.*f\(\)"),
        (awaited, "is async.*asyncio.run"),
        (awaited_parts, "is async"),
        (Awaited(), "is async"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused(function: Callable[..., Any], remedy: str) -> None:
    if not remedy:
        assert Call("key", "f", function, {}).positional == ["images", "prompts"]  # by their order
        return
    with pytest.raises(RewardError, match=f"^key: f.*{remedy}"):
        Call("key", "f", function, {})
