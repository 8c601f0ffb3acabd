//! Memory of this process that can be registered: shared (memfd) or any other memory.

use crate::VerbsErrorKind;
use std::any::Any;
use std::fmt::{self, Debug};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::mm::{MapFlags, ProtFlags};

use super::copy::{copy_bytes, copy_for_peer, copy_to_read};
use super::panics::drop_all;
use super::panics::lock;
use super::{VerbsError, memfd};

/// A range of host memory that outlives every region registered over it.
///
/// The device and peers may write to the memory at any time. Therefore this type never lends the memory out
/// as `&[u8]`. It copies content in and out.
pub struct HostMemory {
    base: NonNull<u8>,
    length: usize,
    /// A number that no other memory of this process has had.
    id: u64,
    backing: Backing,
    sharing: Sharing,
}

/// The use of the memory by peers that map it.
#[derive(Default)]
struct Sharing {
    /// The part of a budget that the memory counts against. It is given back when the memory is gone, and no
    /// peer maps it.
    charge: OnceLock<Charge>,
    users: Mutex<Vec<Weak<dyn MemoryUser>>>,
}

/// A part of a budget, which is given back when the last reference to it is dropped.
pub(crate) type Charge = Arc<dyn Any + Send + Sync>;

/// A part of this process that offered memory to a peer.
pub(crate) trait MemoryUser: Send + Sync {
    /// Notes that the memory `id` is gone in this process.
    fn memory_is_gone(&self, id: u64);
}

enum Backing {
    /// A memfd mapped at `base`. Its length is sealed. Peers may map it, too, but only for reading.
    Shared(OwnedFd),
    /// Memory that the owner keeps alive.
    Owned(#[expect(dead_code, reason = "held for its Drop")] Owner),
}

/// The owner of memory, which may be the application's.
struct Owner(Option<Box<dyn Any + Send + Sync>>);

impl Drop for Owner {
    fn drop(&mut self) {
        // The last reference may be that of the thread that polls for all.
        drop_all(self.0.take());
    }
}

// SAFETY:
// - this type reaches the memory only by `copy_bytes`, which the language defines although another thread, a
//   process or a device changes the bytes meanwhile, and by atomics; so calls of several threads may overlap;
//   and
// - both variants of `Backing` are `Send` and `Sync`.
unsafe impl Send for HostMemory {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps `length` bytes of fresh, zeroed shared memory, aligned at least to a page. `alignment` is a
    /// power of two. Pages cost nothing until they are touched.
    ///
    /// ```
    /// use tonic_rdma_verbs::HostMemory;
    ///
    /// let memory = HostMemory::shared(8192, 4096)?;
    /// memory.copy_in(100, b"content").expect("it fits");
    /// # Ok::<(), tonic_rdma_verbs::VerbsError>(())
    /// ```
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::VerbsErrorKind::InvalidArgument) if `length` is 0, or `alignment` is not
    ///   a power of two.
    /// - [`System`](crate::VerbsErrorKind::System) if the system has no memory or no descriptor left.
    pub fn shared(length: usize, alignment: usize) -> Result<Self, VerbsError> {
        if length == 0 || !alignment.is_power_of_two() || length.checked_add(alignment).is_none() {
            let reason = format!(
                "shared memory of {length} bytes aligned to {alignment}: takes at least a byte, and a power of two"
            );
            return Err(VerbsError::new(VerbsErrorKind::InvalidArgument, reason));
        }
        let failed = |error| VerbsError::os(format!("mapping {length} bytes of shared memory"), error);
        Self::map_shared(length, alignment).map_err(failed)
    }

    fn map_shared(length: usize, alignment: usize) -> io::Result<Self> {
        let fd = memfd::create("tonic-rdma", length)?;
        let base = map_aligned(&fd, length, alignment)?;
        let memory = Self::new(base, length, Backing::Shared(fd));
        if let Backing::Shared(fd) = &memory.backing {
            // Peers map application memory only for reading.
            memfd::seal(fd)?;
        }
        Ok(memory)
    }

    /// Takes over a vector: private memory of this process.
    ///
    /// ```
    /// use tonic_rdma_verbs::HostMemory;
    ///
    /// let memory = HostMemory::from_vec(b"content".to_vec());
    /// let mut bytes = [0; 3];
    /// memory.copy_out(0, &mut bytes).expect("within the memory");
    /// assert_eq!(&bytes, b"con");
    /// ```
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let mut bytes = bytes;
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
        let length = bytes.len();
        Self::new(base, length, Backing::Owned(Owner(Some(Box::new(bytes)))))
    }

    /// Wraps memory that `owner` keeps alive.
    ///
    /// ```
    /// use std::ptr::NonNull;
    /// use tonic_rdma_verbs::HostMemory;
    ///
    /// let bytes: &'static mut [u8] = vec![0; 64].leak();
    /// let base = NonNull::from(bytes).cast();
    /// // SAFETY: the bytes live forever, and no reference to them is left.
    /// let memory = unsafe { HostMemory::from_raw_parts(base, 64, Box::new(())) };
    /// assert_eq!(memory.len(), 64);
    /// ```
    ///
    /// # Safety
    /// - `base` must be valid for reads and writes of `length` bytes for as long as `owner` lives.
    /// - While a request may be outstanding or a peer may reach the memory, no reference to it may exist that
    ///   those accesses would break.
    pub unsafe fn from_raw_parts(
        base: NonNull<u8>,
        length: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self::new(base, length, Backing::Owned(Owner(Some(owner))))
    }

    fn new(base: NonNull<u8>, length: usize, backing: Backing) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { base, length, id: NEXT.fetch_add(1, Relaxed), backing, sharing: Sharing::default() }
    }

    /// Returns a number that no other memory of this process has had. It is not 0.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Sets the part of a budget that the memory counts against. Only the first call has an effect.
    pub(crate) fn set_charge(&self, charge: Charge) {
        let _ = self.sharing.charge.set(charge);
    }

    /// Returns the part of a budget that the memory counts against.
    pub(crate) fn charge(&self) -> Option<Charge> {
        self.sharing.charge.get().cloned()
    }

    /// Adds a part of this process that wants to know when the memory is gone.
    pub(crate) fn add_user(&self, user: Weak<dyn MemoryUser>) {
        let mut users = lock(&self.sharing.users);
        users.retain(|user| user.strong_count() > 0);
        users.push(user);
    }

    /// Returns the virtual address of the first byte.
    #[inline]
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Returns a pointer to the first byte.
    #[inline]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an empty region has no use")]
    #[inline]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns the memfd of shared memory; `None` for other memory.
    pub fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.backing {
            Backing::Shared(fd) => Some(fd.as_fd()),
            Backing::Owned(_) => None,
        }
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    /// Fails if the destination does not lie within the memory.
    #[inline]
    pub fn copy_in(&self, offset: usize, source: &[u8]) -> Result<(), VerbsError> {
        let to = self.at(offset, source.len())?;
        // SAFETY:
        // - `at` checked that the destination lies in this memory, which is valid for writes;
        // - threads, peers and devices may use the destination at the same time, as `copy_bytes` allows; and
        // - `source` can't overlap the destination: no code lends this memory out as a slice while it may be
        //   written (see `from_raw_parts`, and `LocalSegment::new`).
        unsafe { copy_bytes(source.as_ptr(), to, source.len()) };
        Ok(())
    }

    /// Copies `source` to `offset`, for cores of peers to read.
    ///
    /// # Errors
    /// Fails if the destination does not lie within the memory.
    #[inline]
    pub(crate) fn copy_in_for_peers(&self, offset: usize, source: &[u8]) -> Result<(), VerbsError> {
        let to = self.at(offset, source.len())?;
        // SAFETY: as in `copy_in`.
        unsafe { copy_for_peer(source.as_ptr(), to, source.len()) };
        Ok(())
    }

    /// Copies from `offset` into `destination`.
    ///
    /// # Errors
    /// Fails if the source does not lie within the memory.
    #[inline]
    pub fn copy_out(&self, offset: usize, destination: &mut [u8]) -> Result<(), VerbsError> {
        let from = self.at(offset, destination.len())?;
        // SAFETY:
        // - `at` checked that the source lies in this memory, which is valid for reads;
        // - threads, peers and devices may write to the source at the same time, as `copy_bytes` allows; and
        // - `destination` belongs to the caller alone, so it is not a part of this memory.
        unsafe { copy_to_read(from, destination.as_mut_ptr(), destination.len()) };
        Ok(())
    }

    /// Loads the 8 bytes at `offset` at once, with acquire semantics. If another thread or a peer stored
    /// these bytes with release semantics, or [in order](super::QueuePair::places_in_order), then this thread
    /// also sees the earlier stores of that thread or peer.
    ///
    /// # Errors
    /// Fails if the bytes do not lie within the memory, or if their address is not a multiple of 8. Memory of
    /// [`shared`](Self::shared) begins at a multiple of 8.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> Result<u64, VerbsError> {
        // SYNC: pairs with `store_u64`, and with the store of a device that places in order.
        Ok(self.word(offset)?.load(Acquire))
    }

    /// Stores 8 bytes at `offset` at once, with release semantics. A thread that [loads](Self::load_u64) them
    /// sees the earlier stores of this thread.
    ///
    /// # Errors
    /// Those of [`load_u64`](Self::load_u64).
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<(), VerbsError> {
        // SYNC: pairs with `load_u64`, here or in a process that maps this memory.
        self.word(offset)?.store(value, Release);
        Ok(())
    }

    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU64, VerbsError> {
        let word = aligned(self.at(offset, size_of::<AtomicU64>())?, offset)?;
        // SAFETY:
        // - `at` checked that the word lies in this memory, which is valid for reads and writes as long as
        //   `self` lives;
        // - the word is aligned, as `aligned` checked; and
        // - an atomic may be changed at any time, also by other processes and devices; no code lends this
        //   memory out as a slice while they may change it (see `from_raw_parts`, and `LocalSegment::new`).
        Ok(unsafe { &*word })
    }

    /// Checks that `range` can be registered: it is not empty, and lies within the memory.
    #[inline]
    pub(crate) fn check_range(&self, range: &Range<usize>) -> Result<(), VerbsError> {
        if range.start < range.end && range.end <= self.length {
            return Ok(());
        }
        Err(VerbsError::unusable(format!(
            "bytes {} to {} of a memory of {} bytes can't be registered",
            range.start, range.end, self.length
        )))
    }

    #[inline]
    fn at(&self, offset: usize, length: usize) -> Result<*mut u8, VerbsError> {
        VerbsError::check_bounds(offset, length, self.length)?;
        Ok(self.base.as_ptr().wrapping_add(offset))
    }
}

/// Returns the word at `start`, which is at `offset` of a memory.
///
/// # Errors
/// The word is not aligned.
#[inline]
pub(crate) fn aligned(start: *const u8, offset: usize) -> Result<*const AtomicU64, VerbsError> {
    let word = start.cast::<AtomicU64>();
    if word.is_aligned() { Ok(word) } else { Err(VerbsError::misaligned(offset)) }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        for user in lock(&self.sharing.users).drain(..).filter_map(|user| user.upgrade()) {
            user.memory_is_gone(self.id);
        }
        if let Backing::Shared(_) = self.backing {
            // SAFETY:
            // - `base` and `length` are a mapping of our own, made by `map_aligned`, and
            // - nothing refers to it any more: regions hold a reference to this value.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
        }
    }
}

impl Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.backing {
            Backing::Shared(_) => "shared",
            Backing::Owned(_) => "owned",
        };
        write!(f, "HostMemory({kind}, {:#x}, {} bytes)", self.address(), self.length)
    }
}

/// Maps all of `fd` at a multiple of `alignment`: reserves more than is needed, maps over the aligned part
/// and returns the rest to the system.
fn map_aligned(fd: &OwnedFd, length: usize, alignment: usize) -> io::Result<NonNull<u8>> {
    let page = rustix::param::page_size();
    let padding = alignment.max(page);
    let mapped = length.next_multiple_of(page);
    let reserved = mapped + padding;
    // SAFETY: a fresh private mapping at an address of the kernel's choosing touches no memory of ours.
    let start = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE)?
    };
    let offset = start.cast::<u8>().align_offset(padding);
    let aligned = start.cast::<u8>().wrapping_add(offset);
    // SAFETY:
    // - the whole target range lies in the reservation made above, which no other code knows, and
    // - the parts cut off lie in it too, outside the target range.
    unsafe {
        let result = rustix::mm::mmap(
            aligned.cast(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::FIXED,
            fd,
            0,
        );
        if let Err(error) = result {
            let _ = rustix::mm::munmap(start, reserved);
            return Err(error.into());
        }
        if offset > 0 {
            let _ = rustix::mm::munmap(start, offset);
        }
        let tail = reserved - offset - mapped;
        if tail > 0 {
            let _ = rustix::mm::munmap(aligned.wrapping_add(mapped).cast(), tail);
        }
    }
    NonNull::new(aligned).ok_or_else(|| io::Error::other("the kernel mapped memory at address 0"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    /// An owner that panics when it is dropped.
    struct Bomb(Arc<AtomicU64>);

    impl Drop for Bomb {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
            assert!(std::thread::panicking(), "as the test asked");
        }
    }

    /// The last reference to memory may be that of the thread that polls for all.
    #[test]
    fn the_drop_of_an_owner_may_panic() {
        let dropped = Arc::<AtomicU64>::default();
        // SAFETY: the memory has no bytes.
        let memory = unsafe {
            HostMemory::from_raw_parts(NonNull::dangling(), 0, Box::new(Bomb(Arc::clone(&dropped))))
        };
        drop(memory);
        assert_eq!(dropped.load(Relaxed), 1);
    }

    #[test]
    fn words_are_loaded_and_stored_at_their_offset() {
        let shared = HostMemory::shared(4096, 4096).unwrap();
        shared.store_u64(4088, 0x0102_0304_0506_0708).unwrap();
        assert_eq!(shared.load_u64(4088), Ok(0x0102_0304_0506_0708));
        let mut bytes = [0; 8];
        shared.copy_out(4088, &mut bytes).unwrap();
        assert_eq!(bytes, 0x0102_0304_0506_0708_u64.to_ne_bytes());
        shared.copy_in(0, &7_u64.to_ne_bytes()).unwrap();
        assert_eq!(shared.load_u64(0), Ok(7));
    }

    #[test]
    fn words_outside_or_misaligned_are_refused() {
        let shared = HostMemory::shared(4096, 4096).unwrap();
        for offset in [4089, 4096, usize::MAX, usize::MAX - 7] {
            let beyond = VerbsError::out_of_bounds(offset, 8, 4096);
            assert_eq!(shared.load_u64(offset), Err(beyond.clone()));
            assert_eq!(shared.store_u64(offset, 1), Err(beyond));
        }
        for offset in [1, 4, 4087] {
            assert_eq!(shared.store_u64(offset, 1), Err(VerbsError::misaligned(offset)));
        }
        let error = shared.load_u64(4).unwrap_err();
        assert_eq!(error.to_string(), "the word at offset 4 is not at a multiple of 8 bytes");
        // The address decides, not the offset.
        let vector = HostMemory::from_vec(vec![0; 64]);
        let first = (8 - vector.address() as usize % 8) % 8;
        assert_eq!(vector.load_u64(first), Ok(0));
        assert_eq!(vector.load_u64(first + 1), Err(VerbsError::misaligned(first + 1)));
    }
}
