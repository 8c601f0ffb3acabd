//! DLPack: exchange of tensors between the libraries of one process, without a copy (<https://dmlc.github.io/dlpack>,
//! version 0.8).
//!
//! ```text
//!  import:  DlManagedTensor ── Imported::from_raw ──▶ Imported: &[u8] + Layout    dropping it calls the other library's deleter
//!  export:  Bytes + Layout ─── Exported::new ───────▶ Exported ── into_raw ──▶ DlManagedTensor, with a deleter of this crate
//! ```
//!
//! This module does not read elements, and does not know the use of a tensor.

mod error;
mod exported;
mod imported;
mod layout;
mod structures;

pub use error::DlpackError;
pub use exported::Exported;
pub use imported::Imported;
pub use layout::Layout;
pub use structures::{DlDataType, DlDevice, DlManagedTensor, DlTensor};
