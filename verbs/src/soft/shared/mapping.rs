//! Shared memory segments: created by this process, or by a peer. A peer's segment is mapped only if an
//! access can't crash this process.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{MapFlags, ProtFlags};

use crate::memfd;
use crate::soft::closer;
use crate::soft::forked::Origin;

/// A mapping of a memfd. The length is private to this process, so content of the memory can't lead beyond
/// the mapping.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    /// Bytes that callers may access.
    length: usize,
    pages: Option<Pages>,
    /// The process that has mapped a peer's segment; `None` for our own.
    importer: Option<Origin>,
}

/// The pages of a mapping: `length`, rounded up to whole pages. Dropping them unmaps them.
#[derive(Debug)]
struct Pages {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the pages are only unmapped, which any thread can do.
unsafe impl Send for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY:
        // - the mapping is our own, made by `Mapping::map` with this length, and
        // - the `Mapping`, from which references are borrowed, is gone.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

// SAFETY: the memory is reached only through atomics and raw copies, which are sound from any thread.
unsafe impl Send for Mapping {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates a zeroed segment of `length` bytes, maps it for reading and writing, and seals it. Peers can
    /// map the segment only for reading.
    pub(crate) fn create(length: usize) -> io::Result<(Self, OwnedFd)> {
        let fd = memfd::create("tonic-rdma-soft", length)?;
        let mapping = Self::map(&fd, length, ProtFlags::READ | ProtFlags::WRITE)?;
        memfd::seal(&fd)?;
        Ok((mapping, fd))
    }

    /// Maps the first `length` bytes of a peer's segment for reading. Refuses a descriptor whose memory could
    /// end our next access with SIGBUS, and a segment that other processes than its maker can write to.
    pub(crate) fn import(fd: &impl AsFd, length: u64) -> io::Result<Self> {
        let length = memfd::check(fd, length)?;
        let importer = Origin::here()?;
        let mut mapping = Self::map(fd, length, ProtFlags::READ)?;
        mapping.importer = Some(importer);
        Ok(mapping)
    }

    fn map(fd: &impl AsFd, length: usize, protection: ProtFlags) -> io::Result<Self> {
        let mapped = length.checked_next_multiple_of(rustix::param::page_size()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("a segment of {length} bytes"))
        })?;
        // SAFETY: a fresh mapping at an address of the kernel's choosing touches no memory of ours.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped, protection, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        let pages = Some(Pages { base, length: mapped });
        Ok(Self { base, length, pages, importer: None })
    }

    /// Returns the segment as atomic words. Callers must only load from a segment that is mapped only for
    /// reading.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY:
        // - `base` is page-aligned and valid for `length` bytes as long as `self` lives, and
        // - atomics may be changed at any time, also by other processes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU64>(), self.length / 8) }
    }

    /// Returns the number of bytes mapped.
    pub(crate) fn length(&self) -> u64 {
        self.length as u64
    }

    /// Returns the address of `length` bytes at `offset`; `None` if they are not within the segment.
    pub(crate) fn range(&self, offset: u64, length: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        if end > self.length as u64 {
            return None;
        }
        // SAFETY: `offset` is within the mapping, as just checked.
        Some(unsafe { self.base.add(offset as usize) })
    }
}

impl Drop for Mapping {
    /// Unmaps a peer's segment in another thread, because the end of the last mapping frees all pages that
    /// the peer has written.
    fn drop(&mut self) {
        let (pages, importer) = (self.pages.take(), self.importer);
        match importer {
            None => drop(pages),
            // The child keeps its copy of the parent's mapping.
            Some(importer) if importer.is_forked() => {
                let _ = ManuallyDrop::new(pages);
            }
            Some(_) => closer::free(move || drop(pages)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]
    use std::sync::atomic::Ordering::Relaxed;

    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;

    #[test]
    fn both_mappings_are_one_memory() {
        let (ours, fd) = Mapping::create(8192).unwrap();
        let theirs = Mapping::import(&fd, 8192).unwrap();
        ours.words()[1023].store(7, Relaxed);
        assert_eq!(theirs.words()[1023].load(Relaxed), 7);
        assert!(ours.range(8192, 0).is_some() && ours.range(8191, 1).is_some());
        assert!(
            ours.range(8192, 1).is_none()
                && ours.range(u64::MAX, 2).is_none()
                && ours.range(1, u64::MAX).is_none()
        );
    }

    /// Returns a memfd of 4096 bytes that was created with `flags` and has `seals`.
    fn segment(flags: MemfdFlags, seals: SealFlags) -> OwnedFd {
        let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    fn refusal(fd: &impl AsFd, length: u64) -> String {
        Mapping::import(fd, length).unwrap_err().to_string()
    }

    #[test]
    fn segments_that_could_vanish_or_that_others_write_are_refused() {
        let none = MemfdFlags::empty();
        let (shrink, grow, write) = (SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE);
        for seals in [SealFlags::empty(), shrink | grow, shrink | write, grow | write] {
            let fd = segment(none, seals);
            assert!(refusal(&fd, 4096).contains("lacks the seals"), "{seals:?}");
        }
        let sealed = segment(none, shrink | grow | write);
        assert!(Mapping::import(&sealed, 4096).is_ok());
        assert!(refusal(&sealed, 4097).contains("has 4096 of 4097 bytes"));
        assert!(Mapping::import(&sealed, 0).is_err());
        assert!(Mapping::import(&sealed, u64::MAX).is_err());
    }

    /// The length of memory of huge pages can be sealed, but its pages can still be taken away.
    #[test]
    fn memory_of_huge_pages_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        // Creating the descriptor needs no huge page.
        let fd = match rustix::fs::memfd_create("test", flags) {
            Ok(fd) => fd,
            Err(error) => {
                println!("skipped: this kernel has no huge pages: {error}");
                return;
            }
        };
        let length = 2 << 20;
        rustix::fs::ftruncate(&fd, length).unwrap();
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        let refused = refusal(&fd, length);
        assert!(refused.contains("not of ordinary pages"), "{refused}");
    }

    #[test]
    fn descriptors_of_other_kinds_are_refused() {
        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let device = std::fs::File::open("/dev/zero").unwrap();
        for fd in [pipe, event, socket.into(), file.into(), device.into()] {
            assert_eq!(refusal(&fd, 64), "the peer's descriptor is no memfd");
        }
    }

    /// A peer that gets the descriptor of application memory can only read.
    #[test]
    fn peers_can_not_write_to_host_memory() {
        let memory = crate::HostMemory::shared(8192, 4096).unwrap();
        let fd = memory.shared_fd().unwrap();
        assert!(rustix::io::pwrite(fd, &[1], 0).is_err());
        let theirs = Mapping::import(&fd, 8192).unwrap();
        memory.store_u64(8, 77).unwrap();
        assert_eq!(theirs.words()[1].load(Relaxed), 77);
    }

    #[test]
    fn only_the_maker_writes_to_its_segment() {
        let (ours, fd) = Mapping::create(4096).unwrap();
        assert!(rustix::io::pwrite(&fd, &[1], 0).is_err());
        let theirs = Mapping::import(&fd, 4096).unwrap();
        ours.words()[3].store(5, Relaxed);
        assert_eq!(theirs.words()[3].load(Relaxed), 5);
        // The kernel refuses to make the peer's mapping writable.
        // SAFETY: the protection of a mapping of our own, of which no reference is in use.
        let writable = unsafe {
            rustix::mm::mprotect(theirs.base.as_ptr().cast(), 4096, rustix::mm::MprotectFlags::WRITE)
        };
        assert!(writable.is_err());
    }
}
