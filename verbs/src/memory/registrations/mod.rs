//! Memory that a protection domain has registered beyond the slabs of its own pools. Each registration is made once and
//! kept as long as the memory lives.

mod kept;
mod local;
mod slabs;

pub use kept::KeptRegistrations;
pub use local::LocalRegistrations;
pub(crate) use local::segment_of;
pub use slabs::SlabRegistrations;
