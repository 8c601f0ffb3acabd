//! DLPack: borrowed memory of tensors, between libraries of one process (<https://dmlc.github.io/dlpack>, version 0.8).
//!
//! ```text
//!  theirs:  DlManagedTensor ── Imported::from_raw ──▶ Imported: &[u8] + Layout    its drop calls their deleter
//!  ours:    Bytes + Layout ─── Exported::new ───────▶ Exported ── into_raw ──▶ DlManagedTensor, with our deleter
//! ```
//!
//! Never: reads an element, or knows what a tensor is for.

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
