//! A region that its owner uses as a slice while peers read it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::owned::MemRegion;

/// A region that only its owner writes, and that peers may read if they have a grant. The owner uses it as a slice. A peer that
/// reads while the owner writes may get old and new bytes.
pub struct LentRegion {
    loan: RegionLoan,
}

/// The part of a lent region of which peers get grants to read. It gives this process no access to the bytes.
#[derive(Clone)]
pub struct RegionLoan {
    region: Arc<MemRegion>,
}

impl LentRegion {
    /// Lends `region` to peers. None has a grant yet.
    ///
    /// ```
    /// use tonic_rdma_verbs::internal::LentRegion;
    /// use tonic_rdma_verbs::memory::{Budget, MemRegion};
    ///
    /// let mut lent = LentRegion::new(MemRegion::allocate(4096, &Budget::new(1 << 20))?);
    /// lent[..3].copy_from_slice(b"abc");
    /// assert_eq!(lent.try_into_region().map_err(drop).expect("no grant exists")[..3], *b"abc");
    /// # Ok::<(), tonic_rdma_verbs::memory::PoolError>(())
    /// ```
    pub fn new(region: MemRegion) -> Self {
        Self { loan: RegionLoan { region: Arc::new(region) } }
    }

    /// Returns the part of which peers get grants ([`Grant::of_loan`](super::Grant::of_loan)).
    pub fn loan(&self) -> RegionLoan {
        self.loan.clone()
    }

    /// Returns the region to its one owner, if there is no grant and no loan any more.
    ///
    /// # Errors
    /// Returns `self` if there is a grant or a loan.
    pub fn try_into_region(self) -> Result<MemRegion, Self> {
        Arc::try_unwrap(self.loan.region).map_err(|region| Self { loan: RegionLoan { region } })
    }
}

impl RegionLoan {
    /// Returns the region.
    pub(super) fn region(&self) -> &MemRegion {
        &self.region
    }
}

impl Deref for LentRegion {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.loan.region
    }
}

impl DerefMut for LentRegion {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let region = self.loan.region();
        // SAFETY:
        // - The range lies in the mapping, which the region keeps alive, and the memory is initialised.
        // - No other code of this process makes a reference to the bytes: loans and grants only keep the region alive, and `deref`
        //   borrows `self`, which is borrowed mutably here.
        // - Peers and devices never write to the memory: grants are for reading only (`Grant::of_loan`).
        // - They may read it at the same time, in another process, by a device, or by assembly (`copy_bytes`) through an address that
        //   does not come from this slice. What they read reaches only the peer.
        unsafe { std::slice::from_raw_parts_mut(region.as_ptr(), region.len()) }
    }
}

impl fmt::Debug for LentRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentRegion({:p}, {} bytes)", self.loan.region.as_ptr(), self.len())
    }
}

impl fmt::Debug for RegionLoan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionLoan({:p}, {} bytes)", self.region.as_ptr(), self.region.len())
    }
}
