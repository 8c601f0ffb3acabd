//! Slots: buffers into which one peer puts tensors, one after the other.
//!
//! A slot has `depth` buffers, which are used in turn. Each buffer has a **tail** behind it, which the sender
//! writes last. The tail holds the epoch of the buffer's content. Epochs count on forever, also after a
//! reconnection. The receiver polls for one epoch, and that epoch was never in the tail before, so an old
//! tensor is never mistaken for a new one.
//!
//! ```text
//!   sender                                       receiver
//!   epoch 7 ── WRITE payload, tail = 7 ────────▶ [ payload │ tail 7 ]   tail == 7: the payload is whole
//!              count == 7: buffer is free  ◀──── release: writes 7 to the sender's count
//! ```
//!
//! In a **static** slot the payload is a tensor of a type and shape that both sides know (§3.2 of the paper).
//! In a **dynamic** slot the payload is an announcement with the metadata and the address of a tensor. The
//! receiver reads the tensor itself (§3.3), and its release frees the memory at the sender.

pub(crate) mod dynamic_slot;
pub(crate) mod sender;
pub(crate) mod slot;
pub(crate) mod static_slot;
