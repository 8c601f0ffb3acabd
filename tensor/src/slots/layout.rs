//! The layout of a slot's buffers.

/// The layout of a slot's buffers in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The bytes of a payload.
    pub(crate) payload: usize,
    /// The offset of the tail: the end of the payload, rounded up.
    pub(crate) tail: usize,
    pub(crate) stride: usize,
    pub(crate) depth: u32,
}

impl Layout {
    /// Buffers begin on cache lines of their own.
    const ALIGNMENT: usize = 64;

    pub(crate) fn new(payload: usize, depth: u32) -> Option<Self> {
        let tail = payload.checked_next_multiple_of(8)?;
        let stride = tail.checked_add(8)?.checked_next_multiple_of(Self::ALIGNMENT)?;
        stride.checked_mul(depth as usize)?;
        Some(Self { payload, tail, stride, depth })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.stride * self.depth as usize
    }

    /// Returns the offset of the buffer of `epoch`.
    pub(crate) fn start(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride
    }
}
