/* A plugin of SLURM that takes options by the names of pyxis's and starts no container: what it was given is in the
   variables MIMO_TEST_CONTAINER_... of each task. */
#include <string.h>
#include <slurm/spank.h>

SPANK_PLUGIN(containers, 1)

static const char *const variables[] = {"MIMO_TEST_CONTAINER_IMAGE", "MIMO_TEST_CONTAINER_MOUNTS",
                                        "MIMO_TEST_CONTAINER_NO_HOME"};
static const char *given[3];

static int note(int which, const char *text, int remote)
{
    (void)remote;
    given[which] = strdup(text && *text ? text : "yes");
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "IMAGE", "image", 1, 0, note},
    {"container-mounts", "MOUNTS", "mounts", 1, 1, note},
    {"no-container-mount-home", NULL, "without the home folder", 0, 2, note},
    SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    for (int each = 0; each < 3; each++)
        if (spank_option_register(spank, &options[each]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    for (int each = 0; each < 3; each++)
        if (given[each])
            spank_setenv(spank, variables[each], given[each], 1);
    return 0;
}
