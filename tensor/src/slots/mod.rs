//! Placement: slots, into which one peer puts tensors, one after the other.
//!
//! A slot has `depth` buffers, used in turn. Each is followed by its **tail**, which the sender writes last: the epoch of what
//! it has put there. Epochs count on for ever, over reconnections too, so that nothing old is ever taken for new: the receiver
//! looks for one value, and that value was never there before.
//!
//! ```text
//!   sender                                       receiver
//!   epoch 7 ── WRITE payload, tail = 7 ────────▶ [ payload │ tail 7 ]   try_recv: tail == 7? then it is whole
//!              count == 7: buffer is free  ◀──── release: writes 7 to the sender's count
//! ```
//!
//! In a **static** slot the payload is the tensor (§3.2 of the paper), of a type and shape that both ends know. In a
//! **dynamic** one it is the tensor's metadata and address, and the receiver reads the tensor itself (§3.3): the release then
//! says that the source is free.

pub(crate) mod announcement;
pub(crate) mod dynamic_receiver;
pub(crate) mod dynamic_sender;
pub(crate) mod layout;
pub(crate) mod receiver;
pub(crate) mod sender;
pub(crate) mod slot;
pub(crate) mod static_receiver;
pub(crate) mod static_sender;
