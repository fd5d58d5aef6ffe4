"""How long this process has spent compiling, as JAX itself reports it."""

import jax

_STAGES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Seconds of tracing, lowering and compiling in this process since the clock was made.

    An upper bound: functions traced within others count twice, and threads add up.
    """

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_):
        if event in _STAGES:
            self.seconds += seconds

    def close(self):
        jax.monitoring.unregister_event_duration_listener(self._listen)
