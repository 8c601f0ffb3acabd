//! Tensors of the engine tract in the memory of regions, so that a device puts the content where the engine
//! computes.
//!
//! tract allocates its tensors itself, from the global allocator, and takes no memory of others. If that is a
//! [`TracingAllocator`](super::trace::TracingAllocator), it can give a tensor the memory of a region:
//!
//! ```text
//!  HostedTensor::new ──▶ MemRegion      moves into a READ, or is shared with a peer, and comes back
//!                   └──▶ HostedTensor   the tensor, which can't be used meanwhile
//!                            │ with_content(region): the region is over, so the tensor is the engine's
//!                            ▼
//!                          Tensor       ordinary: the engine may change it in place; its drop frees the memory
//! ```
//!
//! The bytes have one owner at any time: the region, until it is given back, and then the tensor.

use std::alloc::Layout;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use tract_data::prelude::{DatumType, Tensor};

use super::region::{MemRegion, RegionPool};
use super::sites::live::{self, NodeScope, Offered};
use crate::VerbsError;

/// The alignment of the tensors, which is enough for all vectors of the engine, and which each extent has.
const ALIGNMENT: usize = 64;

/// A tensor of the engine tract whose content is still to come, in a [`MemRegion`].
pub struct HostedTensor {
    /// Plain numbers, so its drop does not read them.
    tensor: Tensor,
    start: usize,
    length: usize,
}

impl HostedTensor {
    /// Makes a tensor in a region of `pool`. Returns the region, which holds any content, and the tensor.
    /// Returns `None` if the type is none of plain numbers, the tensor has no bytes, the program has another
    /// allocator, or this thread executes nothing
    /// ([`SiteAllocator::enter`](super::sites::SiteAllocator::enter)).
    ///
    /// # Errors
    /// The pool has no memory.
    pub fn new(
        pool: &RegionPool,
        datum: DatumType,
        shape: &[usize],
    ) -> Result<Option<(MemRegion, Self)>, VerbsError> {
        let length = shape.iter().try_fold(datum.size_of(), |bytes, length| bytes.checked_mul(*length));
        let layout = length.and_then(|length| Layout::from_size_align(length, ALIGNMENT).ok());
        let Some(layout) = layout.filter(|layout| is_number(datum) && layout.size() > 0) else {
            return Ok(None);
        };
        if live::current().is_none() {
            return Ok(None);
        }
        let extent = {
            // The tensor has the first ordinal, whatever the pool does.
            let _pause = NodeScope::pause();
            pool.extent(layout.size())?
        };
        debug_assert!(extent.as_ptr().addr().is_multiple_of(ALIGNMENT) && extent.capacity() >= layout.size());
        let offered = Offered { layout, extent: Cell::new(Some(Arc::clone(&extent))) };
        // SAFETY: the elements are plain numbers, so any bytes are a value of them, and the memory is
        // initialised: the kernel zeroes that of pools, and the tensor is not read before its content
        // is there.
        let made =
            live::offering(&offered, || unsafe { Tensor::uninitialized_aligned_dt(datum, shape, ALIGNMENT) });
        let Ok(tensor) = made else { return Ok(None) };
        let (start, length) = (extent.as_ptr().addr(), layout.size());
        if offered.extent.take().is_some() || tensor.as_bytes().as_ptr().addr() != start {
            return Ok(None);
        }
        // From here on only the region gives access to the bytes: the tensor is private until the region is
        // over.
        let region = MemRegion::of_extent(extent, length)?;
        Ok(Some((region, Self { tensor, start, length })))
    }

    /// Returns whether the tensor lies in `region`.
    pub fn is_in(&self, region: &MemRegion) -> bool {
        (region.as_ptr().addr(), region.len()) == (self.start, self.length)
    }

    /// Returns the tensor, whose content is that of `region`.
    ///
    /// # Errors
    /// The tensor does not lie in this region. Returns both.
    pub fn with_content(self, region: MemRegion) -> Result<Tensor, Box<(Self, MemRegion)>> {
        if self.is_in(&region) { Ok(self.tensor) } else { Err(Box::new((self, region))) }
    }
}

impl fmt::Debug for HostedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostedTensor({:#x}, {} bytes)", self.start, self.length)
    }
}

/// Returns whether all bytes are values of the type, and a drop reads none of them.
fn is_number(datum: DatumType) -> bool {
    use DatumType::{F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    matches!(datum, F16 | F32 | F64 | I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64)
}
