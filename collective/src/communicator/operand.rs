//! The memory of an operation: buffers and slices.

use crate::engine::Lent;
use crate::memory::{Buffer, Memory};
use crate::reduce::Number;

/// Elements that an operation takes and gives back.
///
/// | type | the result is in | copies at this rank |
/// |---|---|---|
/// | [`Buffer<T>`] | the same buffer | none |
/// | `(Buffer<T>, Buffer<T>)` | the second buffer; the first stays as it is | none |
/// | `&mut [T]` | the same slice | one |
/// | `(&[T], &mut [T])` | the second slice | one |
/// | `&[T]` | none: only [`send`](crate::Communicator::send) takes it | one |
///
/// A buffer of another communicator is copied as a slice is.
///
/// An operation on buffers goes on also while nothing awaits it. An operation on slices needs its future to be polled, or
/// [`wait`](crate::Operation::wait): drive it to its end, because other ranks wait for it.
pub trait Operand: sealed::Operand {}

impl<X: sealed::Operand> Operand for X {}

/// The memory of an owned operand, and the lengths of input and output in elements.
pub(crate) struct Parts {
    pub(crate) input: Option<Memory>,
    pub(crate) out: Option<Memory>,
}

/// Lengths in elements. Without an input, the operand is in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) input: Option<usize>,
    pub(crate) out: usize,
}

pub(crate) mod sealed {
    use super::{Lengths, Lent, Number, Parts};

    /// What the operations need of an operand. The default methods are those of borrowed elements.
    #[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
    pub trait Operand: Sized {
        type Element: Number;

        /// What an error gives back: owned elements. Slices were lent only.
        type Kept: Unpin;

        /// Returns what an error gives back.
        fn keep(self) -> Option<Self::Kept> {
            None
        }

        fn lengths(&self) -> Lengths;

        /// Returns the bytes.
        fn lend(&mut self) -> Lent<'_>;

        /// Returns the memory of an owned operand, or the operand itself if it is borrowed.
        fn into_parts(self) -> Result<Parts, Self> {
            Err(self)
        }

        /// Puts an owned operand together again; `None` if its memory did not come back.
        fn from_parts(_: Parts, _: Lengths) -> Option<Self> {
            None
        }
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for Buffer<T> {
    type Element = T;
    type Kept = Self;

    fn keep(self) -> Option<Self> {
        Some(self)
    }

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: self.len() }
    }

    fn lend(&mut self) -> Lent<'_> {
        Lent { input: None, out: bytemuck::cast_slice_mut(&mut self[..]) }
    }

    fn into_parts(self) -> Result<Parts, Self> {
        Ok(Parts { input: None, out: Some(self.into_parts().0) })
    }

    fn from_parts(parts: Parts, lengths: Lengths) -> Option<Self> {
        Some(Self::from_parts(parts.out?, lengths.out))
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for (Buffer<T>, Buffer<T>) {
    type Element = T;
    type Kept = Self;

    fn keep(self) -> Option<Self> {
        Some(self)
    }

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.0.len()), out: self.1.len() }
    }

    fn lend(&mut self) -> Lent<'_> {
        Lent {
            input: Some(bytemuck::cast_slice(&self.0[..])),
            out: bytemuck::cast_slice_mut(&mut self.1[..]),
        }
    }

    fn into_parts(self) -> Result<Parts, Self> {
        Ok(Parts { input: Some(self.0.into_parts().0), out: Some(self.1.into_parts().0) })
    }

    fn from_parts(parts: Parts, lengths: Lengths) -> Option<Self> {
        let input = Buffer::from_parts(parts.input?, lengths.input?);
        Some((input, Buffer::from_parts(parts.out?, lengths.out)))
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for &mut [T] {
    type Element = T;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: self.len() }
    }

    fn lend(&mut self) -> Lent<'_> {
        Lent { input: None, out: bytemuck::cast_slice_mut(self) }
    }
}

#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for (&[T], &mut [T]) {
    type Element = T;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.0.len()), out: self.1.len() }
    }

    fn lend(&mut self) -> Lent<'_> {
        Lent { input: Some(bytemuck::cast_slice(self.0)), out: bytemuck::cast_slice_mut(self.1) }
    }
}

/// The operand of a `send`. It has no output, so all other operations refuse it, unless it is empty.
#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl<T: Number> sealed::Operand for &[T] {
    type Element = T;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: Some(self.len()), out: 0 }
    }

    fn lend(&mut self) -> Lent<'_> {
        Lent { input: Some(bytemuck::cast_slice(self)), out: &mut [] }
    }
}

/// The operand of a barrier, which has no elements.
#[allow(private_interfaces, reason = "the trait can't be named outside this crate")]
impl sealed::Operand for () {
    type Element = u8;
    type Kept = ();

    fn lengths(&self) -> Lengths {
        Lengths { input: None, out: 0 }
    }

    fn lend(&mut self) -> Lent<'_> {
        Lent { input: None, out: &mut [] }
    }

    fn into_parts(self) -> Result<Parts, Self> {
        Ok(Parts { input: None, out: None })
    }

    fn from_parts(_: Parts, _: Lengths) -> Option<Self> {
        Some(())
    }
}
