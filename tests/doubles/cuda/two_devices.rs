//! Memory of a second device, which a service has from a client there.

use kvhoist::{Memory, Region, Segment, internals::service::MemoryOwner};

use super::*;

/// A pool of one block on the second of two devices, which is added to the cache.
struct Second {
    gpu: std::sync::Arc<Gpu>,
    pool: DeviceBuffer,
    region: Region,
}

impl Second {
    fn new(cache: &Cache) -> Second {
        let gpu = Gpu::open(1).expect("the double has two devices");
        block_on(cache.add_gpu(gpu.clone())).expect("added");
        let pool = DeviceBuffer::new(gpu.clone(), BLOCK_BYTES).expect("memory");
        let owner: MemoryOwner = cache.memory_owner("the test".into());
        // SAFETY: the pool lives until the region is given back, or for good, and nothing else uses it.
        let lent = unsafe { Memory::device(pool.base().as_ptr(), BLOCK_BYTES) };
        let region = cache.add_region_of(lent, owner).expect("registered");
        Second { gpu, pool, region }
    }

    fn load(&self, cache: &Cache, n: u64) -> Result<bool, Error> {
        let place = vec![Segment { ptr: self.pool.base().as_ptr(), len: BLOCK_BYTES }];
        block_on(cache.load_into(&[key(n)], &[place])).expect("begun").remove(0)
    }
}

fn with_two_devices(name: &str, body: impl FnOnce(&Cache)) {
    with_double(name, "", || {
        // SAFETY: this process has no other thread that reads or writes its environment.
        unsafe { std::env::set_var("DOUBLE_DEVICES", "2") };
        let cache = block_on(Cache::open(config(8).copy(CopyMethod::Kernel))).expect("the double is a device");
        (0..16).for_each(|n| block_on(common::store(&cache, n)));
        body(&cache);
        // The first one works, and so does the tier.
        assert_eq!(cache.stats().device_retired, None);
        end_with_all_on_the_device(cache);
    });
}

#[test]
fn a_second_device_that_stops_is_refused_and_stops_alone() {
    with_two_devices("two_devices::a_second_device_that_stops_is_refused_and_stops_alone", |cache| {
        let second = Second::new(cache);
        assert!(second.load(cache, 1).expect("loaded"));
        ask_double(c"double_stops", 1);
        stop_device();
        second.load(cache, 2).expect_err("the device stopped");
        let error = block_on(cache.add_gpu(second.gpu.clone())).expect_err("it stopped").to_string();
        assert!(error.contains("GPU 1 is out of service") && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        block_on(cache.unregister(&second.region)).expect("its own region");
    });
}

#[test]
fn a_second_device_that_is_silent_retires_no_tier() {
    with_two_devices("two_devices::a_second_device_that_is_silent_retires_no_tier", |cache| {
        // The device has it for good.
        let second = std::mem::ManuallyDrop::new(Second::new(cache));
        allow_events(0);
        ask_double(c"double_doubt", i32::MAX);
        second.load(cache, 2).expect_err("nobody knows");
        ask_double(c"double_doubt", 0);
        allow_events(i32::MAX);
        let error = second.load(cache, 3).expect_err("it is out of service").to_string();
        assert!(error.contains("the driver did not say for 5s"), "{error}");
    });
}

/// The engines of both devices copy from the arena: it is pinned once, for as long as there is one of them.
#[test]
fn the_arena_is_pinned_once() {
    with_two_devices("two_devices::the_arena_is_pinned_once", |cache| {
        let second = Second::new(cache);
        assert!(second.load(cache, 1).expect("loaded"));
        assert_eq!(ask_double(c"double_repinned", 0), 0, "ranges that were pinned already");
        block_on(cache.unregister(&second.region)).expect("its own region");
    });
}

/// A cache copies to memory of its own device only, unless it is told of another one.
#[test]
fn memory_of_another_device_is_refused() {
    with_two_devices("two_devices::memory_of_another_device_is_refused", |cache| {
        for ordinal in [0, 1] {
            let gpu = Gpu::open(ordinal).expect("the double has two devices");
            let pool = DeviceBuffer::new(gpu, BLOCK_BYTES).expect("memory");
            // SAFETY: the pool lives until the region is given back below, and nothing else uses it.
            let registered = block_on(cache.register(unsafe { Memory::device(pool.base().as_ptr(), BLOCK_BYTES) }));
            match registered {
                Ok(region) if ordinal == 0 => block_on(cache.unregister(&region)).expect("its own region"),
                Err(Error::Argument { found, .. }) if ordinal == 1 => assert!(found.contains("GPU 1"), "{found}"),
                other => panic!("memory of GPU {ordinal}: {other:?}"),
            }
        }
        let simulated = config(8).device(DeviceKind::Simulated);
        let simulated = block_on(Cache::open(simulated)).expect("open");
        let pool = DeviceBuffer::new(Gpu::open(0).expect("a device"), BLOCK_BYTES).expect("memory");
        // SAFETY: it is refused.
        let registered = block_on(simulated.register(unsafe { Memory::device(pool.base().as_ptr(), BLOCK_BYTES) }));
        assert!(matches!(registered, Err(Error::Argument { .. })), "{registered:?}");
    });
}
