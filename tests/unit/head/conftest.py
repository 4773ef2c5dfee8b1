from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from meshnet.head.background import Background
from tests.unit.head.telling import Head


@pytest.fixture
async def head() -> AsyncGenerator[Head]:
    async with Background() as background:
        yield Head(background)
