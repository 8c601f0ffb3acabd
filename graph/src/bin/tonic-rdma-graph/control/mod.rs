//! Control of the parts: a gRPC stream of orders and reports between the coordinator and each part.
//!
//! The stream is also the sign of life. A part ends its job when the stream of the coordinator ends, and the coordinator ends the run
//! when the stream of a part ends.

mod links;
pub(crate) mod messages;
pub(crate) mod proto;

pub(crate) use links::{Event, Links};
