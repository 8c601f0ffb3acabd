//! A number for each thread.

thread_local! {
    /// Its address tells threads apart.
    static THREAD: u8 = const { 0 };
}

/// Returns a number that no other thread of this process has meanwhile, and that is not 0.
pub(crate) fn this_thread() -> usize {
    THREAD.try_with(|byte| std::ptr::from_ref(byte).addr()).unwrap_or(usize::MAX)
}
