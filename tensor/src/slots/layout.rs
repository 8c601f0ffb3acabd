//! The layout of a slot's buffers.

/// How a slot's buffers lie in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of what is placed.
    pub(crate) payload: usize,
    /// Offset of the tail: the payload's end, rounded up.
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

    /// Where the buffer of `epoch` begins.
    pub(crate) fn start(&self, epoch: u64) -> usize {
        (epoch % u64::from(self.depth)) as usize * self.stride
    }
}
