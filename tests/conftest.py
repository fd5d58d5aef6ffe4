"""Global test flags. They must be set before anything touches a JAX backend."""

import atexit
import shutil
import tempfile

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# Many tests make engines and trainers of the same shapes; each program is compiled once a session.
_compiled = tempfile.mkdtemp(prefix="tlt_jax_tests_")
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
