//! libibverbs, loaded at run time: a program built with this provider starts on a machine without the
//! library.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use ibverbs_sys as sys;

use crate::{PostErrorKind, VerbsError};

const FILE: &str = "libibverbs.so.1";
/// The package that has the library. `ibv_query_gid_table` is the newest symbol that is needed: rdma-core 32.
const PACKAGE: &str = "libibverbs1 and ibverbs-providers (rdma-core 32 or later)";

/// Declares a table of symbols, and the function that loads it.
macro_rules! symbols {
    ($(#[$attribute:meta])* $visibility:vis struct $table:ident {
        $($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
        $(? $newer:ident = $later:literal: fn($($given:ty),*) -> $answer:ty;)*
    }) => {
        $(#[$attribute])*
        $visibility struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(crate) $newer: Option<unsafe extern "C" fn($($given),*) -> $answer>,)*
            /// Never unloaded, because the symbols are kept in a static.
            _library: libloading::Library,
        }

        impl $table {
            fn load(file: &str) -> Result<Self, libloading::Error> {
                // SAFETY: the library's initialisers set up its own tables, and ask nothing of their caller.
                let library = unsafe { libloading::Library::new(file)? };
                Ok(Self {
                    // SAFETY: the type is that of the symbol's declaration in the library's public header,
                    // which the version in the library's file name keeps.
                    $($name: *unsafe { library.get($symbol)? },)*
                    // SAFETY: the type is that of the symbol's declaration in the public header.
                    $($newer: unsafe { library.get($later) }.ok().map(|found| *found),)*
                    _library: library,
                })
            }
        }
    };
}

pub(super) use symbols;

symbols! {
    /// The functions of libibverbs that are used. Manual pages of the same names describe them. The functions
    /// for polling, posting and arming are in each device's own table, `ibv_context_ops`.
    #[derive(Debug)]
    pub(crate) struct Library {
        fork_init = b"ibv_fork_init\0": fn() -> c_int;
        get_device_list = b"ibv_get_device_list\0": fn(*mut c_int) -> *mut *mut sys::ibv_device;
        free_device_list = b"ibv_free_device_list\0": fn(*mut *mut sys::ibv_device);
        get_device_name = b"ibv_get_device_name\0": fn(*mut sys::ibv_device) -> *const c_char;
        open_device = b"ibv_open_device\0": fn(*mut sys::ibv_device) -> *mut sys::ibv_context;
        close_device = b"ibv_close_device\0": fn(*mut sys::ibv_context) -> c_int;
        query_device = b"ibv_query_device\0": fn(*mut sys::ibv_context, *mut sys::ibv_device_attr) -> c_int;
        query_port = b"ibv_query_port\0":
            fn(*mut sys::ibv_context, u8, *mut sys::_compat_ibv_port_attr) -> c_int;
        query_gid_table = b"_ibv_query_gid_table\0":
            fn(*mut sys::ibv_context, *mut sys::ibv_gid_entry, usize, u32, usize) -> isize;
        get_async_event = b"ibv_get_async_event\0":
            fn(*mut sys::ibv_context, *mut sys::ibv_async_event) -> c_int;
        ack_async_event = b"ibv_ack_async_event\0": fn(*mut sys::ibv_async_event);
        alloc_pd = b"ibv_alloc_pd\0": fn(*mut sys::ibv_context) -> *mut sys::ibv_pd;
        dealloc_pd = b"ibv_dealloc_pd\0": fn(*mut sys::ibv_pd) -> c_int;
        reg_mr = b"ibv_reg_mr\0": fn(*mut sys::ibv_pd, *mut c_void, usize, c_int) -> *mut sys::ibv_mr;
        dereg_mr = b"ibv_dereg_mr\0": fn(*mut sys::ibv_mr) -> c_int;
        create_comp_channel = b"ibv_create_comp_channel\0":
            fn(*mut sys::ibv_context) -> *mut sys::ibv_comp_channel;
        destroy_comp_channel = b"ibv_destroy_comp_channel\0": fn(*mut sys::ibv_comp_channel) -> c_int;
        create_cq = b"ibv_create_cq\0":
            fn(*mut sys::ibv_context, c_int, *mut c_void, *mut sys::ibv_comp_channel, c_int) -> *mut sys::ibv_cq;
        resize_cq = b"ibv_resize_cq\0": fn(*mut sys::ibv_cq, c_int) -> c_int;
        destroy_cq = b"ibv_destroy_cq\0": fn(*mut sys::ibv_cq) -> c_int;
        get_cq_event = b"ibv_get_cq_event\0":
            fn(*mut sys::ibv_comp_channel, *mut *mut sys::ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events = b"ibv_ack_cq_events\0": fn(*mut sys::ibv_cq, c_uint);
        create_srq = b"ibv_create_srq\0":
            fn(*mut sys::ibv_pd, *mut sys::ibv_srq_init_attr) -> *mut sys::ibv_srq;
        destroy_srq = b"ibv_destroy_srq\0": fn(*mut sys::ibv_srq) -> c_int;
        create_qp = b"ibv_create_qp\0": fn(*mut sys::ibv_pd, *mut sys::ibv_qp_init_attr) -> *mut sys::ibv_qp;
        destroy_qp = b"ibv_destroy_qp\0": fn(*mut sys::ibv_qp) -> c_int;
        modify_qp = b"ibv_modify_qp\0": fn(*mut sys::ibv_qp, *mut sys::ibv_qp_attr, c_int) -> c_int;
        ? query_qp_data_in_order = b"ibv_query_qp_data_in_order\0":
            fn(*mut sys::ibv_qp, sys::ibv_wr_opcode::Type, u32) -> c_int;
        ? reg_dmabuf_mr = b"ibv_reg_dmabuf_mr\0":
            fn(*mut sys::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut sys::ibv_mr;
    }
}

/// Returns the library. The first call loads it; its result stays for the life of the process.
pub(super) fn library() -> Result<&'static Library, VerbsError> {
    static LOADED: OnceLock<Result<Library, VerbsError>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let failed = |error| VerbsError::library(FILE, PACKAGE, Arc::new(error));
        let library = Library::load(FILE).map_err(failed)?;
        // Before the first registration: otherwise a child process of a fork could take the parent's pages
        // away from the device (man 3 ibv_fork_init). SAFETY: takes no arguments, and is called before any
        // other function of the library.
        match unsafe { (library.fork_init)() } {
            0 => {}
            error => tracing::warn!(
                error = %io::Error::from_raw_os_error(error.abs()),
                "ibv_fork_init failed: a child process that this one forks may take pages from the device"
            ),
        }
        Ok(library)
    });
    loaded.as_ref().map_err(VerbsError::clone)
}

/// An object of libibverbs, destroyed on drop. Its user keeps all objects that this one depends on in fields
/// after it, because fields are dropped in order.
pub(super) struct Owned<T> {
    object: NonNull<T>,
    destroy: unsafe extern "C" fn(*mut T) -> c_int,
    /// What `destroy` does, for its error.
    action: &'static str,
}

// SAFETY: libibverbs is thread-safe throughout, every object of it (rdma-core, Documentation/libibverbs.md).
unsafe impl<T> Send for Owned<T> {}
// SAFETY: the reasons for `Send` hold for `Sync`.
unsafe impl<T> Sync for Owned<T> {}

impl<T> Owned<T> {
    /// Takes over an object that was just created, or returns `None` for a null pointer.
    ///
    /// # Safety
    /// `destroy` may be called with the object when the value is dropped: no other code destroys it, all
    /// objects that depend on it are gone by then, and all objects that it depends on are still alive.
    pub(super) unsafe fn new(
        object: *mut T,
        destroy: unsafe extern "C" fn(*mut T) -> c_int,
        action: &'static str,
    ) -> Option<Self> {
        NonNull::new(object).map(|object| Self { object, destroy, action })
    }

    pub(super) fn as_ptr(&self) -> *mut T {
        self.object.as_ptr()
    }
}

impl<T> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the caller of `new` promised it.
        let result = unsafe { (self.destroy)(self.object.as_ptr()) };
        if let Err(error) = check(self.action, result) {
            tracing::warn!(%error, "an object of the device can't be given back");
        }
    }
}

/// Returns the error of a function that reported it by a null pointer or -1.
pub(super) fn last_error(action: impl std::fmt::Display) -> VerbsError {
    VerbsError::os(action, io::Error::last_os_error())
}

/// Returns the error of a function that reported it by its result. Drivers disagree about the sign, and some
/// return -1 and set `errno`.
pub(super) fn check(action: impl std::fmt::Display, returned: c_int) -> Result<(), VerbsError> {
    match returned {
        0 => Ok(()),
        -1 => Err(last_error(action)),
        error => Err(VerbsError::os(action, io::Error::from_raw_os_error(error.saturating_abs()))),
    }
}

/// Returns the meaning of a driver's error number. Drivers disagree about its sign.
pub(super) fn post_error_kind(error: i32) -> PostErrorKind {
    match error.saturating_abs() {
        libc::ENOMEM | libc::EAGAIN => PostErrorKind::QueueFull,
        libc::EOPNOTSUPP | libc::ENOSYS => PostErrorKind::Unsupported,
        error => PostErrorKind::Refused(error),
    }
}

/// Makes reads of a descriptor fail when there is nothing to read.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    rustix::io::ioctl_fionbio(fd, true).map_err(|error| {
        VerbsError::os(format_args!("making descriptor {} non-blocking", fd.as_raw_fd()), error)
    })
}
