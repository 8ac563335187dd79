"""What a candidate may name, as tables. What is absent here is refused."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


IMPORTS = _words(
    """torch torch.nn torch.nn.functional torch.nn.init torch.autograd triton triton.language
    triton.language.math triton.language.extra triton.language.extra.libdevice triton.language.extra.cuda
    triton.language.extra.cuda.libdevice triton.testing math typing __future__ typing_extensions collections.abc"""
)
# Python's own modules and numpy: what is here is all that a candidate finds in them (`shelf`).
SHELF = {
    "functools": _words("cache lru_cache partial reduce wraps"),
    "dataclasses": _words("dataclass field"),
    "enum": _words("Enum IntEnum auto"),
    "itertools": _words("product chain combinations permutations repeat zip_longest"),
    "operator": _words("add sub mul truediv floordiv mod neg"),
    "abc": _words("ABC abstractmethod"),
    "collections": _words("OrderedDict defaultdict namedtuple"),
    "contextlib": _words("contextmanager nullcontext"),
    "logging": _words("DEBUG INFO WARNING ERROR CRITICAL basicConfig getLogger debug info warning error critical"),
    "warnings": _words("warn filterwarnings simplefilter"),
    "numpy": _words("pi e inf nan prod sqrt exp log log2 ceil floor"),
}
IMPORTABLE = "torch, triton, math, typing and parts of " + ", ".join(sorted(SHELF)) + " may be used"
SHELF_NUMBERS = _words("pi e inf nan DEBUG INFO WARNING ERROR CRITICAL")
LOGGER = _words("debug info warning error critical log setLevel")
BUILTINS = _words(
    """abs all any bool bytes dict divmod enumerate filter float frozenset int isinstance len list map max min
    pow print range repr reversed round set slice sorted staticmethod classmethod str sum super tuple zip object
    getattr hasattr None True False NotImplemented Ellipsis Exception ValueError TypeError RuntimeError
    AssertionError KeyError IndexError NotImplementedError __name__ callable property Warning UserWarning
    RuntimeWarning DeprecationWarning FutureWarning AttributeError ArithmeticError ZeroDivisionError ImportError
    ModuleNotFoundError type"""
)
# Names whose mere use is refused, wherever it stands: code made at run time, and what opens the judge's own process.
FORBIDDEN_NAMES = _words(
    """exec eval compile __import__ globals locals vars dir open input breakpoint memoryview setattr delattr id
    type __builtins__ __loader__ __spec__ help exit quit issubclass"""
)
HINTS = {"type": " but for type(x)", "open": "; nothing is read or written", "id": "; nothing is kept between calls"}
DUNDERS = _words("__init__ __name__ __future__ __all__ __version__")

# Attributes of frames, tracebacks, generators and code: the way from an object to whoever runs it.
INSIDES = _words(
    """gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await cr_origin ag_frame ag_code ag_await tb_frame tb_next
    tb_lasti tb_lineno f_back f_builtins f_code f_globals f_locals f_trace co_code co_consts co_names func_globals
    func_code im_func with_traceback add_note mro"""
)
DTYPES = _words(
    """float float16 float32 float64 bfloat16 half double int int8 int16 int32 int64 uint8 uint16 uint32 uint64
    long short bool complex64 complex128 float8_e4m3fn float8_e5m2 contiguous_format channels_last
    channels_last_3d preserve_format strided Tensor Size dtype device memory_format inf nan pi e newaxis
    Generator FloatTensor LongTensor __version__"""
)
# torch.*: making and moving tensors. Allowed while the answer is made.
PLUMBING = _words(
    """empty empty_like empty_strided zeros zeros_like ones ones_like full full_like tensor as_tensor
    scalar_tensor arange reshape flatten unflatten transpose permute squeeze unsqueeze t movedim swapaxes narrow
    select split chunk unbind broadcast_to broadcast_shapes as_strided clone detach is_tensor numel no_grad
    inference_mode promote_types finfo iinfo is_floating_point get_default_dtype result_type enable_grad
    set_grad_enabled is_grad_enabled atleast_1d broadcast_tensors eye"""
)
# torch.*: while modules are built, when no input has been seen.
SETUP = PLUMBING | _words(
    """rand randn randint randperm rand_like randn_like normal linspace logspace sqrt rsqrt exp log pow cos sin
    cat stack concat hstack vstack outer einsum matmul mul add sub div sum mean prod triu tril abs neg round
    floor ceil clamp where cumsum flip roll repeat_interleave diag reciprocal square sign manual_seed meshgrid
    mm bmm tanh sigmoid set_float32_matmul_precision"""
)
# Flags of torch that change nothing: it computes nothing.
FLAGS = _words(
    """torch.backends.cuda.matmul.allow_tf32 torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark torch.backends.cudnn.deterministic"""
)
HOLD_FLAGS = _words("torch.backends torch.backends.cuda torch.backends.cuda.matmul torch.backends.cudnn")
CUDA = _words(
    """current_device device_count is_available synchronize get_device_properties get_device_capability
    get_device_name device empty_cache is_bf16_supported"""
)
PLAIN_RESULTS = _words(
    """numel is_tensor broadcast_shapes promote_types finfo iinfo is_floating_point get_default_dtype
    result_type no_grad inference_mode enable_grad set_grad_enabled is_grad_enabled device
    set_float32_matmul_precision"""
)
TRITON_HOST = _words(
    """cdiv next_power_of_2 jit autotune heuristics Config reinterpret __version__ TRITON_MAX_TENSOR_NUMEL"""
)
TYPING_MODULES = _words("typing typing_extensions collections.abc")
TYPING = _words(
    """Any Callable Dict Final List Literal Optional Sequence Tuple Type Union Iterable Mapping cast Set
    annotations overload NamedTuple ClassVar Iterator Hashable MutableMapping TypeAlias Annotated
    TYPE_CHECKING TypeVar"""
)
HOT_TENSOR = _words(
    """shape dtype device is_cuda ndim T mT H size stride numel nelement dim view view_as reshape reshape_as
    contiguous is_contiguous to cuda float half bfloat16 double int long bool short transpose permute t
    unsqueeze squeeze flatten unflatten expand expand_as narrow select split chunk unbind detach clone new_empty
    new_zeros new_ones new_full new_tensor new_empty_strided zero_ fill_ copy_ data_ptr element_size itemsize
    storage_offset requires_grad requires_grad_ is_floating_point as_strided movedim moveaxis swapaxes swapdims
    type type_as get_device index ndimension is_complex data unfold diagonal layout is_meta nbytes ravel
    squeeze_ unsqueeze_ transpose_ resize_ bits is_signed dim_order save_for_backward mark_non_differentiable
    set_materialize_grads needs_input_grad saved_tensors mark_dirty"""
)
PLAIN_TENSOR = _words(
    """shape dtype device is_cuda ndim size stride numel nelement dim is_contiguous data_ptr element_size
    itemsize storage_offset requires_grad is_floating_point get_device index ndimension is_complex layout nbytes
    is_meta type is_signed dim_order"""
)
SETUP_TENSOR = HOT_TENSOR | _words(
    """uniform_ normal_ zero_ fill_ mul_ add_ div_ sub_ mul add div sub sqrt rsqrt exp log pow sum mean prod abs
    neg reciprocal cos sin outer triu tril clamp clamp_ floor round repeat repeat_interleave flip roll
    kaiming_uniform_ xavier_uniform_ constant_ register_buffer item tolist masked_fill_ masked_fill cumsum diag
    matmul mm tanh sigmoid square argmax argmin max min softmax norm var std bernoulli_ exponential_ random_ cpu"""
)
CONTAINER = _words(
    """append extend items keys values get pop update insert sort reverse count copy clear setdefault add remove
    startswith endswith upper lower strip split join replace bit_length is_integer real imag"""
)
PLAIN_CONTAINER = _words("count bit_length is_integer startswith endswith upper lower strip join real imag")
DRIVER = _words(
    """triton.runtime.driver triton.runtime.driver.active triton.runtime.driver.active.utils
    triton.runtime.driver.active.get_current_device triton.runtime.driver.active.get_active_torch_device
    triton.runtime.driver.active.get_current_target triton.runtime.driver.active.utils.get_device_properties"""
)
DEVICE_PROPERTIES = _words(
    """multi_processor_count multiprocessor_count warp_size total_memory major minor name
    max_threads_per_multi_processor regs_per_multiprocessor shared_memory_per_block
    shared_memory_per_block_optin shared_memory_per_multiprocessor max_shared_mem L2_cache_size eps tiny
    smallest_normal bits backend arch"""
)
# What a triton.Config may be asked for.
CONFIG = _words("kwargs num_warps num_stages num_ctas")
# What an nn layer of torch may be asked for; running it is refused.
LAYER = _words(
    """weight bias in_features out_features in_channels out_channels kernel_size padding dilation groups eps
    num_features running_mean running_var num_batches_tracked affine normalized_shape negative_slope p
    num_groups num_channels momentum track_running_stats elementwise_affine stride output_padding alpha lambd
    min_val max_val beta threshold approximate dim num_embeddings embedding_dim padding_idx hidden_size
    input_size num_layers training weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0 weight_ih_l1 weight_hh_l1
    bias_ih_l1 bias_hh_l1 in_proj_weight in_proj_bias out_proj num_heads head_dim embed_dim scale_factor
    output_size ceil_mode count_include_pad kernel margin reduction inplace requires_grad_ parameters"""
)
MODULE = _words(
    """register_buffer register_parameter training parameters named_parameters register_module add_module eval
    reset_parameters"""
)
# What torch's modules are made of: a candidate that defines or assigns one would change how the judge's calls are
# answered.
NO_OVERRIDE = _words(
    """_apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl _forward_hooks
    _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks _forward_pre_hooks_with_kwargs
    _get_backward_hooks _get_backward_pre_hooks _get_name _is_full_backward_hook _load_from_state_dict
    _load_state_dict_post_hooks _load_state_dict_pre_hooks _maybe_warn_non_full_backward_hook _modules
    _named_members _non_persistent_buffers_set _parameters _register_load_state_dict_pre_hook
    _register_state_dict_hook _replicate_for_data_parallel _save_to_state_dict _slow_forward _state_dict_hooks
    _state_dict_pre_hooks _version _wrapped_call_impl add_module apply bfloat16 buffers call_super_init children
    compile cpu cuda double eval float get_buffer get_extra_state get_parameter get_submodule half ipu
    load_state_dict modules mtia
    named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule
    share_memory state_dict to to_empty train type xpu zero_grad"""
)
NN_FORBIDDEN = _words("functional parallel utils modules attention quantized intrinsic qat backends grad")
INIT_FORBIDDEN = _words("torch math warnings Tensor")
COMPUTES = _words(
    """matmul mm bmm addmm baddbmm mv dot einsum linear conv1d conv2d conv3d relu relu_ gelu silu sigmoid
    sigmoid_ tanh tanh_ softmax log_softmax exp exp_ log log_ sqrt rsqrt sum mean max min amax amin argmax
    argmin prod var std norm add add_ sub sub_ mul mul_ div div_ pow square abs abs_ neg neg_ clamp clamp_ where
    cumsum cumprod sort topk cat stack concat hstack vstack layer_norm batch_norm group_norm dropout pad lerp
    logsumexp masked_fill masked_fill_ maximum minimum gather scatter index_select take repeat tile roll flip
    triu tril sin cos floor ceil round sign erf reciprocal addcmul addcdiv outer inner tensordot kron cdist
    cross_entropy mse_loss item tolist numpy apply_ map_ __matmul__"""
)

# Inside kernels.
KERNEL_BUILTINS = _words(
    """range min max abs int float bool len print None True False isinstance str tuple list zip enumerate sum"""
)
TL_FORBIDDEN = _words(
    """core semantic standard inline_asm_elementwise target_info builtin str_to_ty tensor_descriptor_base ir
    tl jit wraps module module_from_spec pkgutil utils"""
)
# Modules of triton's language that may be gone through; what else has members is a dtype or a tensor.
TL_MODULES = _words("math random extra cuda hip libdevice")
KERNEL_ATTRIBUTES = _words(
    """to shape dtype T trans sum max min argmax argmin xor_sum cumsum cumprod sort element_ty scalar value type
    numel store load atomic_add atomic_min atomic_max gather scatter reshape view broadcast_to permute split
    expand_dims cast ravel flip abs exp log sqrt sin cos sigmoid softmax cdiv logical_and logical_or advance
    is_floating is_fp32 is_fp16 is_bf16 is_int primitive_bitwidth itemsize int_bitwidth fp_mantissa_width is_ptr
    is_block is_int_signed is_int_unsigned associative_scan reduce histogram rsqrt exp2 log2 floor ceil erf fma
    bitwidth atomic_xchg atomic_cas block_shape strides name"""
)
STORES = _words(
    """store atomic_add atomic_max atomic_min atomic_cas atomic_xchg atomic_and atomic_or atomic_xor
    store_tensor_descriptor tensor_descriptor_store scatter"""
)

# Operators of torch's dispatcher that make or move tensors; every other one computes.
ATEN_PLUMBING = _words(
    """_has_compatible_shallow_copy_type _reshape_alias _to_copy _unsafe_view alias arange as_strided
    as_strided_ broadcast_to chunk clone contiguous copy_ detach detach_ diagonal empty empty_like empty_strided
    expand expand_as eye fill_ flatten full full_like is_pinned is_same_size lift lift_fresh lift_fresh_copy
    movedim narrow new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute reshape
    resize_ scalar_tensor select set_ slice split split_with_sizes squeeze squeeze_ t t_ transpose transpose_
    unbind unflatten unfold unsqueeze unsqueeze_ view view_as view_as_real zero_ zeros zeros.out zeros_like"""
)


def of_language(path: str) -> bool:
    """Whether a dotted name below ``triton.language`` may be used."""
    *inner, last = path.split(".")[2:]
    closed = any(part.startswith("_") or part in TL_FORBIDDEN for part in (*inner, last))
    modules = all(part in TL_MODULES for part in inner)
    return not closed and (modules or (not TL_MODULES & set(inner) and {*inner[1:], last} <= KERNEL_ATTRIBUTES))


def is_inside(attribute: str) -> bool:
    """Whether an attribute of this name opens Python's inside, whatever it is an attribute of."""
    return attribute in INSIDES or (attribute.startswith("__") and attribute not in DUNDERS)
