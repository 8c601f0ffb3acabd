//! Conversions from and to tensors of other libraries, without a copy where the memory's alignment and order
//! allow it.
//!
//! | library | into a [`Tensor`](super::Tensor) | out of a tensor | cargo feature |
//! |---|---|---|---|
//! | ndarray | `Tensor::from_array` | `Tensor::as_array` | `ndarray` |
//! | safetensors | `Safetensors::read` | `SafetensorsView` | `safetensors` |
//! | DLPack (numpy, PyTorch, …) | [`Tensor::from_dlpack`](super::Tensor::from_dlpack) | [`Tensor::to_dlpack`](super::Tensor::to_dlpack) | none |

mod dlpack;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "safetensors")]
mod safetensors;

#[cfg(feature = "safetensors")]
pub use safetensors::{Safetensors, SafetensorsView};
