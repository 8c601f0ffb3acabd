//! Reliable connected queue pairs, their work requests, and receive queues that many of them share.

use std::any::Any;
use std::fmt::{self, Debug};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;

use super::sealed::Sealed;
use super::{
    Access, DeviceAttributes, LocalSegment, MemoryRegion, MemoryWindow, PostError, QueuePairState,
    RemoteSegment, RemoteView, VerbsError,
};

/// A reliable connected (RC) queue pair (`struct ibv_qp`). Dropping the last reference destroys it;
/// outstanding requests then get no completion.
///
/// A queue pair that takes receives from a [shared receive queue](super::SharedReceiveQueue) goes to Error
/// when it is dropped, and is destroyed up to a second later, when the receives that it had taken have
/// completed. Until then the device may still read or write the memory of its outstanding requests, within
/// their registrations.
///
/// Requests on the send queue run and complete in the order of posting. Later sends and writes may overtake
/// an RDMA READ in execution, but not in completion.
pub trait QueuePair: Sealed + Any + Send + Sync + Debug {
    /// Returns the number that completions carry; unique within the device.
    fn number(&self) -> QueuePairNumber;

    /// Returns the state.
    fn state(&self) -> QueuePairState;

    /// Returns the reason why the queue pair is in Error, for people; `None` in other states, or if
    /// [`to_error`](Self::to_error) moved it there. The first reason stays.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Returns the capacity that the queue pair was created with.
    fn capacity(&self) -> &QueuePairCapacity;

    /// Returns the address that the peer needs to connect, for [`to_rtr`](Self::to_rtr) on its side. Valid
    /// from Init on.
    fn local_address(&self) -> QueuePairAddress;

    /// Moves from Reset to Init. `access` limits the peer's rights through this queue pair; a region can't
    /// grant more.
    ///
    /// # Errors
    /// [`InvalidState`](crate::VerbsErrorKind::InvalidState) in another state than Reset, or
    /// [`System`](crate::VerbsErrorKind::System).
    fn to_init(&self, access: Access) -> Result<(), VerbsError>;

    /// Connects to `peer` and moves from Init to Rtr (ready to receive). The call may wait for an answer of
    /// the peer's device, for 2.5 seconds at most.
    ///
    /// # Errors
    /// - [`InvalidState`](crate::VerbsErrorKind::InvalidState) in another state than Init.
    /// - [`InvalidAddress`](crate::VerbsErrorKind::InvalidAddress) if `peer` is no address of this provider.
    /// - [`Limit`](crate::VerbsErrorKind::Limit) if the device does not support a setting.
    /// - [`Unreachable`](crate::VerbsErrorKind::Unreachable) if the peer's device can't be reached, or the
    ///   peer refuses.
    /// - [`NotAdmitted`](crate::VerbsErrorKind::NotAdmitted) if the peer runs as another user, and is not let in.
    /// - [`System`](crate::VerbsErrorKind::System) if the system refuses.
    fn to_rtr(&self, peer: &QueuePairAddress, settings: &PathSettings) -> Result<(), VerbsError>;

    /// Moves from Rtr to Rts (ready to send).
    ///
    /// # Errors
    /// [`InvalidState`](crate::VerbsErrorKind::InvalidState) in another state than Rtr,
    /// [`Limit`](crate::VerbsErrorKind::Limit) if the device does not support a setting, or
    /// [`System`](crate::VerbsErrorKind::System).
    fn to_rts(&self, settings: &PathSettings) -> Result<(), VerbsError>;

    /// Moves from any state to Error: outstanding requests complete as flushed.
    fn to_error(&self);

    /// Posts requests in order.
    ///
    /// # Errors
    /// The first request that could not be posted, and the reason. The requests before it were posted.
    fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError>;

    /// Posts receives in order. Allowed in Error, where they complete as flushed.
    ///
    /// # Errors
    /// The first receive that could not be posted, and the reason. The receives before it were posted.
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;

    /// Returns whether the arrival of the last bytes shows that all earlier data has arrived, without a
    /// completion. This concerns data that peers WRITE to this side through this queue pair, and data of
    /// READs of this queue pair (man 3 ibv_query_qp_data_in_order).
    ///
    /// If this function returns true: a thread that finds the new value in the last 8 bytes of a WRITE, or of
    /// a READ's last segment, finds all other bytes of that request in place, and those of every earlier
    /// WRITE on this queue pair. The 8 bytes must be at an address that is a multiple of 8, and the thread
    /// must load them at once, with acquire semantics
    /// ([`HostMemory::load_u64`](super::HostMemory::load_u64)). The order of other bytes is not defined. The
    /// new value must differ from every earlier value at that address: use an epoch, not a flag.
    fn places_in_order(&self) -> bool {
        false
    }

    /// Returns whether [`open_window`](Self::open_window) opens windows on this device.
    fn has_windows(&self) -> bool {
        false
    }

    /// Gives the peer of this queue pair the rights `access` to the bytes `range` of `region`, without a
    /// registration, until the window is dropped. The range counts in bytes from the start of the region's
    /// [memory](MemoryRegion::memory). The bounds are exact to the byte, and no other queue pair can use the
    /// key. `access` may have rights of peers that the region does not give. Local rights in `access` do not
    /// count.
    ///
    /// The window opens before the next request of this queue pair, so a message that is posted later may
    /// tell the peer of the key. Returns `None` if the device has no windows, or if it has no room for one
    /// now. Then [register](crate::ProtectionDomain::register_range) the range.
    ///
    /// # Errors
    /// - [`Unusable`](crate::VerbsErrorKind::Unusable) if the range is empty, or not within the region, or if
    ///   the peer is to write and the region has no right of local writing.
    /// - [`InvalidArgument`](crate::VerbsErrorKind::InvalidArgument) if the region is of another protection
    ///   domain.
    /// - [`Limit`](crate::VerbsErrorKind::Limit) or [`System`](crate::VerbsErrorKind::System) if the device
    ///   refuses.
    fn open_window(
        &self,
        region: &Arc<dyn MemoryRegion>,
        range: Range<usize>,
        access: Access,
    ) -> Result<Option<Arc<dyn MemoryWindow>>, VerbsError> {
        let _ = (region, range, access);
        Ok(None)
    }

    /// Returns the functions that only the software device has, because the CPUs of both sides do its work.
    /// `None` on other devices.
    ///
    /// A thread that does not hold the queue pair keeps a clone of the `Arc`.
    fn local(&self) -> Option<&Arc<dyn LocalQueuePair>> {
        None
    }
}

/// A queue pair of a device whose work the CPUs of both sides do ([`QueuePair::local`]). Any thread may call
/// these functions. None of them waits for the peer. Once the queue pair is destroyed, they carry out nothing.
pub trait LocalQueuePair: Sealed + Send + Sync + Debug {
    /// Returns evidence that both sides access one memory.
    fn probe(&self) -> Probe;

    /// Carries out work of the peer, at most about a megabyte. Returns whether there was any. Without work,
    /// this function takes a few loads from the cache. Also continues requests of this queue pair for which
    /// the device had no room, as far as the peer has made room. A thread that waits for a value in its
    /// memory, and does not poll the completion queue, calls this function while it waits.
    ///
    /// If this function returns true, a sequentially consistent fence has followed the stores to memory.
    /// Completions stay for the next poll. They make an event if the completion queue is armed.
    fn progress(&self) -> bool;

    /// Notes that a thread calls [`progress`](Self::progress) again and again, so that WRITEs without
    /// immediate data need no events of the completion queue of receives. (Otherwise each makes an event if
    /// the queue is armed, as a completion does, and the poll after that event returns no completion for the
    /// WRITE.) That thread must poll the completion queue from time to time, too. This note holds until
    /// [`need_events`](Self::need_events) is called, or no thread has carried out work for some milliseconds.
    /// Returns whether such events were asked for.
    fn need_no_events(&self) -> bool;

    /// Takes [`need_no_events`](Self::need_no_events) back. If the completion queue is armed, WRITEs that
    /// come from now on make an event. The caller then calls [`progress`](Self::progress), because WRITEs may
    /// have come before.
    fn need_events(&self);

    /// Carries out a READ of `remote` into `into` at once, if this thread can copy the bytes itself. Returns
    /// whether the bytes have arrived. If so, there is no completion. If not, some of the bytes may have
    /// arrived, and nothing else has happened. The caller then posts an ordinary READ, whose completion has
    /// the reason if it fails, too.
    fn read_at_once(&self, into: &[LocalSegment], remote: RemoteSegment) -> bool;

    /// Returns whether the thread that posts a READ copies the bytes itself, once the peer's memory is
    /// mapped. False if the CPU of the peer brings the bytes; then several READs at a time are faster than
    /// one. The answer holds from Rtr on, and is false before.
    fn reads_by_copy(&self) -> bool;

    /// Returns a view of `length` bytes of the peer's memory at `remote`, if this process has mapped them.
    ///
    /// # Errors
    /// - [`NotMapped`](crate::VerbsErrorKind::NotMapped) if this process has not mapped the bytes yet. A READ
    ///   of them makes the peer offer its memory.
    /// - [`Unsupported`](crate::VerbsErrorKind::Unsupported) if this device maps no memory of this peer: the
    ///   peer's process belongs to another user, or the peer gives no right to read.
    /// - [`Revoked`](crate::VerbsErrorKind::Revoked) if the peer has taken the memory back, or the bytes do
    ///   not lie within it.
    fn view(&self, remote: RemoteSegment, length: u64) -> Result<RemoteView, VerbsError>;
}

/// Evidence that two sides share memory ([`LocalQueuePair::probe`]). It consists of the nonce that this side
/// wrote, and the nonce that this side read in the peer's memory. Each side sends the nonce that it read to
/// its peer, over another connection. The sides share memory only if both nonces match. The default, without
/// nonces, is that of a device that needs no such proof.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Nonce of this side, written to its own memory before the peer connected.
    pub ours: Option<u64>,
    /// Nonce of the peer, read from the peer's memory, from Rtr on.
    pub peers: Option<u64>,
}

/// Number of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueuePairNumber(pub u32);

impl fmt::Display for QueuePairNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Capacity of a queue pair (`struct ibv_qp_cap`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePairCapacity {
    /// Most requests outstanding on the send queue.
    pub send_requests: u32,
    /// Most requests outstanding on the receive queue.
    pub receive_requests: u32,
    /// Most segments of a send request.
    pub send_segments: u32,
    /// Most segments of a receive request.
    pub receive_segments: u32,
    /// Most inline bytes of a send request.
    pub inline: u32,
}

impl QueuePairCapacity {
    /// Checks the numbers of requests and of segments against the limits of a device.
    pub(crate) fn check(&self, most: &DeviceAttributes) -> Result<(), VerbsError> {
        VerbsError::check_limits([
            ("send queue depth", self.send_requests, most.max_work_requests),
            ("receive queue depth", self.receive_requests, most.max_work_requests),
            ("segments of a send", self.send_segments, most.max_segments),
            ("segments of a receive", self.receive_segments, most.max_segments),
        ])
    }
}

/// Attributes of the connection (`struct ibv_qp_attr`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathSettings {
    /// Most RDMA READs outstanding, as initiator and as target.
    pub outstanding_reads: u8,
    /// Number of retries of a send while the peer has no receive posted, 0–7; 7 means without end.
    pub rnr_retry: u8,
    /// Time that a peer waits before a retry, as the 5-bit code of IBA vol. 1, table 45 (1 = 0.01 ms, 0 =
    /// 655.36 ms).
    pub min_rnr_timer: u8,
    /// Transport timeout: 4.096 µs × 2^`timeout`, 1–31; 0 means without end.
    pub timeout: u8,
    /// Transport retries, 0–7.
    pub retry_count: u8,
    /// Service level, 0–15.
    pub service_level: u8,
    /// Traffic class, 0–255.
    pub traffic_class: u8,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Path MTU in bytes, 256–4096; `None` takes the MTU of the port.
    pub mtu: Option<u16>,
}

impl Default for PathSettings {
    fn default() -> Self {
        Self {
            outstanding_reads: 16,
            rnr_retry: 7,
            min_rnr_timer: 1,
            timeout: 14,
            retry_count: 7,
            service_level: 0,
            traffic_class: 0,
            pkey_index: 0,
            mtu: None,
        }
    }
}

/// The address of a queue pair, which the peer needs to connect. Only the provider that made the address can
/// read it. An address has at most [`MAX_LENGTH`](Self::MAX_LENGTH) bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePairAddress(Box<[u8]>);

impl QueuePairAddress {
    /// Longest address, in bytes.
    pub const MAX_LENGTH: usize = 256;

    /// Creates an address from its bytes; `None` if there are too many.
    ///
    /// ```
    /// use tonic_rdma_verbs::QueuePairAddress;
    ///
    /// let received = [1, 2, 3]; // from the peer
    /// let address = QueuePairAddress::new(received).expect("not too long");
    /// assert_eq!(address.as_bytes(), received);
    /// ```
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Option<Self> {
        let bytes = bytes.into();
        (bytes.len() <= Self::MAX_LENGTH).then_some(Self(bytes))
    }

    /// Returns the bytes, to send them to the peer.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A shared receive queue (SRQ, `struct ibv_srq`). All queue pairs that were created with the queue take
/// their receives from it. Therefore the memory for incoming messages grows with the number of messages, not
/// with the number of queue pairs. Dropping the last reference destroys the queue. Each of its queue pairs
/// holds a reference.
///
/// A receive completes on the receive queue of the queue pair that took it, and the completion names that
/// queue pair. Receives that no queue pair took are not flushed. A receive that a queue pair took completes,
/// although the queue pair is in Error or was dropped; if it was dropped, this takes up to a second, and the
/// completion names no queue pair (number 0).
pub trait SharedReceiveQueue: Sealed + Any + Send + Sync + Debug {
    /// Returns the number of receives that may be outstanding.
    fn capacity(&self) -> u32;

    /// Posts receives. The queue pairs take the receives in the order of posting.
    ///
    /// # Errors
    /// Those of [`QueuePair::post_receive`](super::QueuePair::post_receive).
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError>;
}

/// A request for the send queue (`struct ibv_send_wr`).
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// Identifier that the completion carries.
    pub wr_id: u64,
    /// The operation.
    pub operation: Operation<'a>,
    /// Whether success is reported. A failure is always reported. A request that is not signalled keeps its
    /// slot in the send queue until the next signalled request completes.
    pub signaled: bool,
}

/// The operation of a send request.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Delivers `data` into the next receive that the peer posted.
    Send {
        /// The message.
        data: Payload<'a>,
        /// Immediate data, delivered beside the message.
        immediate: Option<u32>,
    },
    /// Writes `data` into the peer's memory. A write with immediate data also consumes a receive of the peer,
    /// but does not touch the buffer of that receive.
    Write {
        /// The bytes to write.
        data: Payload<'a>,
        /// The destination.
        remote: RemoteSegment,
        /// Immediate data, delivered in the peer's receive completion.
        immediate: Option<u32>,
    },
    /// Reads as many bytes of the peer's memory as `into` holds.
    Read {
        /// The destination segments, in this order.
        into: &'a [LocalSegment],
        /// The source.
        remote: RemoteSegment,
    },
}

/// The source of the bytes of a send or write.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory. Its content must not change until the request has completed.
    Registered(&'a [LocalSegment]),
    /// Any memory. `post_send` copies the bytes before it returns (`IBV_SEND_INLINE`).
    Inline(&'a [IoSlice<'a>]),
}

impl Payload<'_> {
    /// Returns the length of the payload in bytes.
    #[inline]
    pub fn length(&self) -> u64 {
        match self {
            Self::Registered(segments) => LocalSegment::total(segments),
            Self::Inline([slice]) => slice.len() as u64,
            Self::Inline(slices) => slices.iter().map(|slice| slice.len() as u64).sum(),
        }
    }
}

/// A request for the receive queue (`struct ibv_recv_wr`).
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Identifier that the completion carries.
    pub wr_id: u64,
    /// The segments that the message fills, in this order.
    pub into: &'a [LocalSegment],
}

/// Returns 64 random bits of the system's generator, such as the token that a peer must know to connect to a
/// queue pair.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is writable for the length given.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == bytes.len() as isize { Ok(u64::from_ne_bytes(bytes)) } else { Err(io::Error::last_os_error()) }
}
