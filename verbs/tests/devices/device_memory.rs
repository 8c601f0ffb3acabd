//! Memory of another device, registered by its dmabuf. The kernel's udmabuf stands for that device,
//! because it makes a dmabuf of host memory. Therefore the test can read the memory.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use tonic_rdma_verbs::{
    CompletionOpcode, CompletionStatus, DeviceMemoryRegion, DmaBuf, HostMemory, LocalSegment, VerbsErrorKind,
};

use crate::fabric::{ALL, Fabric, Side, default_pair, pattern, until_placed};

const LENGTH: usize = 64 << 10;
/// Address for requests. The process uses this address for no other memory. Its offset in a page is that of
/// the memory.
const IOVA: u64 = 0x7000_0000_0000;

/// Prints the reason why a part of the test is not run.
fn note(what: &str) {
    let _ = writeln!(std::io::stderr(), "left out: {what}");
}

/// Makes a dmabuf of host memory, if the kernel can (`include/uapi/linux/udmabuf.h`).
fn dmabuf(memory: &HostMemory) -> Option<OwnedFd> {
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    const UDMABUF_CREATE: libc::c_ulong = 0x4018_7542;
    let maker = File::options().read(true).write(true).open("/dev/udmabuf").ok()?;
    let memfd = memory.shared_fd().unwrap().as_raw_fd() as u32;
    let create = Create { memfd, flags: 1, offset: 0, size: memory.len() as u64 };
    // SAFETY: the request reads a `Create`, and no other memory of this process.
    let fd = unsafe { libc::ioctl(maker.as_raw_fd(), UDMABUF_CREATE as _, &raw const create) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and has no other owner.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A device without dmabuf registration refuses every descriptor for that reason. Other devices name the
/// fault of the descriptor.
pub fn other_descriptors_are_refused(fabric: &dyn Fabric) {
    let (a, _b) = default_pair(fabric);
    let memory = HostMemory::shared(LENGTH, 4096).unwrap();
    let fd = memory.shared_fd().unwrap();
    let part = DmaBuf { fd, offset: 0, length: LENGTH as u64, iova: IOVA };
    let error = a.domain.register_dmabuf(&part, ALL).unwrap_err();
    match (fabric.name(), error.kind()) {
        ("soft", VerbsErrorKind::Unsupported) => {
            assert_eq!(error.to_string(), "the device has no dmabuf registration");
        }
        ("ibverbs", VerbsErrorKind::Unsupported) => {
            note(&error.to_string());
            assert_eq!(error.to_string(), "the device has no dmabuf registration in its driver");
        }
        ("ibverbs", VerbsErrorKind::Unusable) => assert!(error.reason().contains("is no dmabuf"), "{error}"),
        _ => panic!("{error:?}"),
    }
}

/// A part of a dmabuf works like host memory, if the device can register the part.
pub fn device_memory(fabric: &dyn Fabric) {
    let memory = HostMemory::shared(LENGTH, 4096).unwrap();
    let Some(fd) = dmabuf(&memory) else { return note("no /dev/udmabuf to make a dmabuf by") };
    let (a, b) = default_pair(fabric);
    let offset = 4096 + 24;
    let length = 8192 + 5;
    let part = DmaBuf { fd: fd.as_fd(), offset, length, iova: IOVA + 24 };
    let region = match b.domain.register_dmabuf(&part, ALL) {
        Ok(region) => region,
        Err(error) if error.kind() == VerbsErrorKind::Unsupported => {
            return note(&format!("{}: {error}", fabric.name()));
        }
        Err(error) => panic!("{error}"),
    };
    drop(fd);
    assert_eq!((region.iova(), region.length()), (IOVA + 24, length));
    exchange(fabric, (&a, &b), &memory, &region, offset as usize);
    a.write(9, a.segment(0, 1), region.remote(length));
    a.expect_refusal(fabric, 9, CompletionStatus::RemoteAccess);
}

/// Transfers the whole region in both directions by WRITE and by READ. The region begins at `offset` of the
/// memory.
fn exchange(
    fabric: &dyn Fabric,
    (a, b): (&Side, &Side),
    memory: &HostMemory,
    region: &Arc<dyn DeviceMemoryRegion>,
    offset: usize,
) {
    let length = region.length() as usize;
    let found = || {
        let mut bytes = vec![0; length];
        memory.copy_out(offset, &mut bytes).unwrap();
        bytes
    };
    a.fill(0, &pattern(1, length));
    a.write(1, a.segment(0, length), region.remote(0));
    a.expect(1, CompletionOpcode::Write);
    until_placed(fabric, a, b);
    assert_eq!(found(), pattern(1, length));
    a.read(2, a.segment(100, length), region.remote(0));
    a.expect(2, CompletionOpcode::Read);
    assert_eq!(a.content(100, length), pattern(1, length));
    let all = LocalSegment::of_device(&**region, 0..region.length());
    b.write(3, all, a.remote(7));
    b.expect(3, CompletionOpcode::Write);
    until_placed(fabric, b, a);
    assert_eq!(a.content(7, length), pattern(1, length));
    a.fill(0, &pattern(2, length));
    b.read(4, all, a.remote(0));
    b.expect(4, CompletionOpcode::Read);
    assert_eq!(found(), pattern(2, length));
}
