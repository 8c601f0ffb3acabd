//! The segments of the requests in a list (`struct ibv_sge`).

use ibverbs_sys as sys;

use crate::{LocalSegment, PostErrorKind};

/// Segments of all requests of a batch, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Segments(pub(crate) Vec<sys::ibv_sge>);

impl Segments {
    /// Appends segments of registered memory, and empty ones up to `least`. Returns their number.
    pub(crate) fn add(
        &mut self,
        segments: &[LocalSegment],
        least: usize,
        most: u32,
        max_bytes: u64,
    ) -> Result<i32, PostErrorKind> {
        if segments.len() > most as usize {
            return Err(PostErrorKind::TooManySegments);
        }
        let bytes = segments.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.length()));
        if bytes > max_bytes || segments.iter().any(|segment| segment.length() > u32::MAX.into()) {
            return Err(PostErrorKind::MessageTooLong);
        }
        // Some devices take a segment of no bytes for one of 2 GiB (man 3 ibv_post_send does not mention it).
        let filled = segments.iter().filter(|segment| segment.length() > 0);
        let before = self.0.len();
        self.0.extend(filled.map(|segment| sys::ibv_sge {
            addr: segment.address(),
            length: segment.length() as u32,
            lkey: segment.lkey().0,
        }));
        self.0.resize(self.0.len().max(before + least), sys::ibv_sge::default());
        Ok((self.0.len() - before) as i32)
    }
}
