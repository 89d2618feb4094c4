"""torch for tests of guidance, or the reason why they are skipped: it belongs to a server's environment."""

import pytest

torch = pytest.importorskip("torch", reason="guidance runs where torch is, and torch is not installed here")
torch.set_num_threads(1)  # rows are short: a second thread only waits
