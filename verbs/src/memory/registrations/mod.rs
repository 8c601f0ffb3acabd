//! Memory that a protection domain has registered beyond the slabs of its own pools. Each registration is made once and
//! kept as long as the memory lives.

mod local;
mod slabs;

pub use local::LocalRegistrations;
pub(crate) use local::segment_of;
pub use slabs::SlabRegistrations;
