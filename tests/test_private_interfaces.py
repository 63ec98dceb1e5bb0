"""Private names of libraries on which this project rests: a new version fails here first, with the name.

A name is private where it, or a module on its path, begins with an underscore. pyproject.toml bounds the versions.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
import submitit
import torch
import torch.distributed.tensor
import transformers.integrations.moe
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("zeroexp/**/*.py"), *ROOT.glob("hydra_plugins/**/*.py")])
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
LOOK_UP = ("getattr", "hasattr", "setattr", "delattr")

IMPORTED = {
    "torch._C.DispatchKey",
    "torch._C._distributed_c10d.FakeProcessGroup",
    "torch._C._distributed_c10d.FakeWork",
    "torch._C._functorch.TransformType",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._dynamo.utils.counters",
    "torch._meta_registrations",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.optim._muon",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode",
    "torch.utils._python_dispatch._pop_mode_temporarily",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_iter",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
    "torch.utils.checkpoint._CheckpointFrame",
}
# Expressions, each with the private name at its end.
ATTRIBUTES = {
    "Tensor._version",
    "Tensor._use_count",
    "Tensor.untyped_storage()._cdata",
    "nn.Parameter(Tensor)._backward_hooks",
    "nn.Parameter(Tensor)._post_accumulate_grad_hooks",
    "nn.Linear(1, 1)._forward_pre_hooks",
    "nn.Linear(1, 1)._parameters",
    "nn.Linear(1, 1)._modules",
    "nn.Linear(1, 1)._non_persistent_buffers_set",
    "nn.RNN(1, 1)._flat_weight_refs",
    "nn.RNN(1, 1)._flat_weights_names",
    "torch.optim.SGD([Tensor])._optimizer_step_post_hooks",
    "torch.optim.SGD([Tensor])._optimizer_step_pre_hooks",
    "torch.amp.GradScaler(word)._found_inf_per_device",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.ops.aten.mm.default._schema",
    "torch.ops.aten.mm.default._overloadpacket",
    "torch._C",
    "torch._C._current_autograd_node",
    "torch._C._autograd",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._current_graph_task_id",
    "torch._C._storage_Use_Count",
    "torch.optim._muon._adjust_lr",
    "torch.optim._muon._zeropower_via_newtonschulz",
    "torch._has_compatible_shallow_copy_type",
    "torch._chunk_cat",
    "torch._neg_view",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._meta_registrations._create_grouped_mm_output_tensor",
    "torch._meta_registrations._meta_grouped_mm_common",
    "torch.distributed._coalescing_manager",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal",
    "torch.distributed.ProcessGroup._register_backend",
    "torch.cpu._is_avx512_supported",
    "torch.cpu._is_avx512_bf16_supported",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.cuda.memory._record_memory_history",
    "torch.cuda.memory._snapshot",
    "transformers.integrations.moe._can_use_grouped_mm",
    "llama._no_split_modules",
    "llama._keys_to_ignore_on_load_unexpected",
    "llama.config._experts_implementation",
    "submitit.SlurmExecutor._submit_command",
    "submitit.SlurmExecutor._make_submission_file_text",
}
OF_DEEPSPEED = {"_hp_mapping"}  # of one version, whose tests are strategies/test_deepspeed.py
OF_PYTHON = {"_exit", "_fields", "_getframe", "_replace"}  # documented in its library


SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
)
with FakeTensorMode():
    FAKE = torch.empty(1)
EXAMPLES = {
    **{"torch": torch, "nn": nn, "submitit": submitit, "transformers": transformers},
    **{"Tensor": torch.zeros(1), "fake": FAKE, "word": "cpu"},
    "llama": LlamaForCausalLM(LlamaConfig(**dict.fromkeys(SIZES, 8))),
}


@cache
def nodes() -> list[ast.AST]:
    return [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text("utf-8")))]


def our_names() -> set[str]:
    """Names that the sources define themselves: functions, fields of classes, attributes that they assign."""
    names: set[str] = set()
    for node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    return names


def imported_names() -> Iterator[str]:
    for node in nodes():
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("zeroexp"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(PRIVATE.fullmatch(part) for part in name.split(".")):
                    yield name


def attributes() -> Iterator[str]:
    for node in nodes():
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOK_UP:
            yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def name_of(expression: str) -> str:
    return expression.rpartition(".")[2]


@pytest.mark.parametrize("name", sorted(IMPORTED))
def test_a_private_name_can_be_imported(name):
    resolve_name(name)


@pytest.mark.parametrize("expression", sorted(ATTRIBUTES))
def test_a_private_attribute_is_there(expression):
    eval(expression, EXAMPLES)


def test_every_private_name_stands_above():
    assert set(imported_names()) == IMPORTED
    used = {name for name in attributes() if PRIVATE.fullmatch(name)}
    used -= OF_PYTHON | OF_DEEPSPEED
    listed = {name_of(expression) for expression in ATTRIBUTES}
    assert used - our_names() <= listed, "a public way, or a row above"
    assert listed <= used, "rows that nothing uses"


def test_libraries_with_private_names_are_bounded_above():
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    for library in ("torch", "transformers", "submitit", "hydra-core", "mlflow"):
        (bound,) = [each for each in bounds if re.match(rf"{library}\b", each)]
        assert "<" in bound
