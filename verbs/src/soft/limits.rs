//! The abilities and limits of the software device.

use super::shared::table;
use crate::DeviceAttributes;

/// Name of the software device.
pub const NAME: &str = "soft0";
/// Most requests outstanding on one queue.
pub(super) const MAX_WORK_REQUESTS: u32 = 1 << 14;
/// Most bytes of one request.
pub(super) const MAX_MESSAGE: u64 = 1 << 31;
/// Most segments of one request.
pub(super) const MAX_SEGMENTS: u32 = 32;
/// Most READs of one queue pair that the peer serves at a time. Further READs wait in the send queue.
pub(super) const MAX_READS: usize = 128;
/// Most inline bytes of one request.
pub(super) const MAX_INLINE: u32 = 128 << 10;
/// Messages and READs of at least this length go past the caches, because they are as long as the last-level cache and would not stay
/// there.
pub(super) const PAST_CACHES: u64 = 32 << 20;

/// Returns the abilities and limits of the software device.
///
/// ```
/// use tonic_rdma_verbs::soft;
///
/// assert!(soft::attributes().immediate);
/// ```
pub fn attributes() -> DeviceAttributes {
    DeviceAttributes {
        max_message_size: MAX_MESSAGE,
        max_work_requests: MAX_WORK_REQUESTS,
        max_segments: MAX_SEGMENTS,
        max_read_segments: MAX_SEGMENTS,
        max_inline: MAX_INLINE,
        max_outstanding_reads: MAX_READS as u32,
        max_completions: 1 << 22,
        max_memory_regions: table::REGIONS,
        immediate: true,
        locks_memory: false,
        ..DeviceAttributes::new("soft", NAME)
    }
}
