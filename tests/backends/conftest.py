"""What is shared in tests/support and asserts: pytest explains a failure there as it does in a test file."""

import pytest

pytest.register_assert_rewrite("operation_cases", "operation_contract", "backend_contract", "checkpoint_contract")
