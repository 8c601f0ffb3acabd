//! Tensors of other libraries, without a copy where their memory is aligned and in order.

mod dlpack;
#[cfg(feature = "ndarray")]
mod ndarray;
#[cfg(feature = "safetensors")]
mod safetensors;

#[cfg(feature = "safetensors")]
pub use safetensors::{Safetensors, SafetensorsView, read_safetensors};
