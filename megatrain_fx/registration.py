"""Registration of host memory with the accelerator's driver, given up at its first refusal."""

import logging

from megatrain_fx.driver import Driver
from megatrain_fx.host_memory import HostMemory

logger = logging.getLogger(__name__)


class Registration:
    """Registers host memory until the driver first refuses, and says so once.

    Attributes:
        driver: who registers; None leaves all memory as it is.
        refusal: why the driver refused; None if it never did.
    """

    def __init__(self, driver: Driver | None) -> None:
        self.driver = driver
        self.refusal: str | None = None

    @property
    def active(self) -> bool:
        """Whether more memory will be registered."""
        return self.driver is not None and self.refusal is None

    def register(self, memory: HostMemory) -> None:
        """Register one piece of memory, if there is a driver that does."""
        if self.driver is None or self.refusal is not None:
            return
        self.refusal = memory.register(self.driver)
        if self.refusal is not None:
            logger.warning(
                "%s. Copies of host memory that is not registered go through pinned staging buffers, which is slower; "
                "raise the limit on locked memory, or choose pin='staging' to do without this warning",
                self.refusal,
            )
